"""Signed tokens: what the embedded identity issues and any of our services can check without asking anybody.

A token is `mn1.` + base64url(claims in MessagePack + Ed25519 signature). It is verified by signature and expiry;
revocation is a small set of audit ids and of "everything of this user/project issued before" marks, which lives in
memory and is fed by whoever revokes.
"""

import base64
import binascii

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from micronova.objects.errors import Unauthorized

PREFIX = "mn1."
_SIGNATURE = 64


class Claims(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a token says. Array-like: the order of fields is the format; add only at the end, with defaults."""

    user_id: str
    user_name: str
    user_domain_id: str
    issued_at: float
    expires_at: float
    audit_ids: tuple[str, ...]
    methods: tuple[str, ...] = ("password",)
    project_id: str | None = None
    project_name: str | None = None
    project_domain_id: str | None = None
    domain_id: str | None = None
    system: bool = False
    roles: tuple[tuple[str, str], ...] = ()  # (id, name)
    application_credential_id: str | None = None
    restricted: bool = False  # an application credential that may not make others


class Revocations:
    """What is no longer good although its signature is."""

    def __init__(self) -> None:
        self._audit_ids: dict[str, float] = {}  # audit id -> when the token would have expired anyway
        self._marks: dict[str, float] = {}  # "user:ID", "project:ID", … -> everything issued up to then is void

    def revoke(self, audit_id: str, expires_at: float) -> None:
        """Void one token (and those made from it)."""
        self._audit_ids[audit_id] = expires_at

    def revoke_all(self, subject: str, until: float) -> None:
        """Void every token of a subject that was issued up to a moment.

        Subjects: `user:ID`, `project:ID`, `credential:ID`, `domain:ID` (of its users and for its projects),
        `grant:USER:SCOPE` (a user's tokens for one project, one domain or `system`).
        """
        self._marks[subject] = max(until, self._marks.get(subject, 0.0))

    def covers(self, claims: Claims) -> bool:
        """Say whether the token is revoked."""
        if any(audit_id in self._audit_ids for audit_id in claims.audit_ids):
            return True
        if not self._marks:
            return False
        scope = claims.project_id or claims.domain_id or ("system" if claims.system else "")
        subjects = (
            f"user:{claims.user_id}",
            f"project:{claims.project_id}",
            f"credential:{claims.application_credential_id}",
            f"grant:{claims.user_id}:{scope}",
            f"domain:{claims.user_domain_id}",
            f"domain:{claims.project_domain_id or claims.domain_id}",
        )
        return any(claims.issued_at <= self._marks.get(subject, 0.0) for subject in subjects)

    def forget_expired(self, now: float, lifetime: float | None = None) -> None:
        """Drop entries about tokens that have run out by themselves; no token lives longer than `lifetime`."""
        self._audit_ids = {key: until for key, until in self._audit_ids.items() if until > now}
        if lifetime is not None:
            self._marks = {key: at for key, at in self._marks.items() if at + lifetime > now}


class TokenVerifier:
    """Checks tokens with the public key alone; verified ones are remembered."""

    def __init__(self, public_key: bytes, revocations: Revocations, remember: int = 4096) -> None:
        self._key = Ed25519PublicKey.from_public_bytes(public_key)
        self.revocations = revocations
        self._remember = remember
        self._known: dict[str, Claims] = {}

    def verify(self, token: str, now: float, *, allow_expired: bool = False) -> Claims:
        """Return the token's claims; raise Unauthorized when it is forged, expired or revoked."""
        claims = self._known.get(token)
        if claims is None:
            claims = self._decode(token)
            if len(self._known) >= self._remember:
                self._known.clear()
            self._known[token] = claims
        if (claims.expires_at <= now and not allow_expired) or self.revocations.covers(claims):
            raise Unauthorized("The token has expired or was revoked; ask for a new one.")
        return claims

    def _decode(self, token: str) -> Claims:
        if not token.startswith(PREFIX) or len(token) > 8192:
            raise Unauthorized("The token is not valid.")
        text = token[len(PREFIX) :]
        try:
            data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            payload, signature = data[:-_SIGNATURE], data[-_SIGNATURE:]
            self._key.verify(signature, payload)
            return msgspec.msgpack.decode(payload, type=Claims)
        except (InvalidSignature, binascii.Error, ValueError, msgspec.MsgspecError):
            raise Unauthorized("The token is not valid.") from None


class TokenSigner:
    """Makes tokens; only the identity service has the private key."""

    def __init__(self, private_key: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private_key)

    @staticmethod
    def generate() -> bytes:
        """Make a new private key (32 bytes)."""
        return Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
        )

    @property
    def public_key(self) -> bytes:
        """The key that verifiers need (32 bytes)."""
        return self._key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)

    def sign(self, claims: Claims) -> str:
        """Return the token that says this."""
        payload = msgspec.msgpack.encode(claims)
        return PREFIX + base64.urlsafe_b64encode(payload + self._key.sign(payload)).decode().rstrip("=")
