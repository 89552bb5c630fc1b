"""Signed tokens: the embedded identity service issues them, and our services verify them without a request to it.

A token is `mn1.` + base64url(claims in MessagePack + Ed25519 signature). It is verified by signature and expiry. Its
claims name the key that signed it, so that keys can be exchanged: a new key is known to all verifiers before it signs,
and an old one is accepted until the tokens that it signed have expired.

A token with access rules begins with `mn2.`, which its signature covers. Services of 0.2 and older, which do not know
access rules, so refuse it.

Revocations are kept in memory: audit ids of single tokens, and for a user or project a time up to which all its tokens
are void. Whoever revokes a token feeds them.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterable, Sequence

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from micronova.http import revocation_subjects
from micronova.http.access_rules import AccessRules
from micronova.http.revocation_subjects import Subject
from micronova.objects.errors import Unauthorized

PREFIX = "mn1."
PREFIX_WITH_RULES = "mn2."  # of tokens with access rules
LONGEST = 8192  # characters of a token
REVOCATION_OVERLAP = 60.0
"""Seconds that each read of revocations reaches back: clocks differ, and transactions commit out of order."""
_SIGNATURE = 64


class Claims(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The content of a token. The order of the fields is the format: add fields only at the end, with defaults."""

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
    restricted: bool = False  # by an application credential that may not create others
    key_id: str = ""  # of the key that signed the token; "" in tokens of 0.2 and older
    trust_id: str | None = None
    trust_user_id: str | None = None  # the trustor; with `impersonation` the trustee
    trust_user_domain_id: str | None = None
    impersonation: bool = False  # the token is the trustor's, and the trustee uses it
    access_rules: AccessRules | None = None  # of the application credential; None: it has none, and may do everything
    trust_agents: tuple[tuple[str, str], ...] = ()  # of a redelegated trust: parties of the others, and their domains


class TokenKey(msgspec.Struct, frozen=True):
    """A private key (32 bytes) and the time from which it signs tokens, until that of the next key."""

    private: bytes
    since: float = 0.0

    @property
    def public(self) -> bytes:
        """The key that verifiers need (32 bytes)."""
        key = Ed25519PrivateKey.from_private_bytes(self.private)
        return key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)

    @staticmethod
    def generate() -> bytes:
        """Make a new private key."""
        return Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
        )


def in_use(keys: Iterable[TokenKey], now: float, lifetime: float) -> list[TokenKey]:
    """Return the keys, the oldest first, without those whose tokens have all expired."""
    ordered = sorted(keys, key=lambda key: key.since)
    following = [key.since for key in ordered[1:]]
    old = sum(1 for since in following if since + lifetime < now)
    return ordered[old:]


def key_id(public_key: bytes) -> str:
    """Return the name of a key in tokens."""
    return hashlib.sha256(public_key).hexdigest()[:16]


class UnknownKey(Unauthorized):
    """The token is signed by a key that this verifier does not know; the identity service may know it."""


class Revocations:
    """Tokens that are void although their signature is valid."""

    def __init__(self) -> None:
        self._audit_ids: dict[str, float] = {}  # audit id -> when the token would have expired anyway
        # subject -> everything issued up to the first time is void, and has expired at the second
        self._marks: dict[Subject, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._audit_ids) + len(self._marks)

    def revoke(self, audit_id: str, expires_at: float) -> None:
        """Revoke one token, and those made from it."""
        self._audit_ids[audit_id] = expires_at

    def revoke_all(self, subject: Subject, until: float, expires_at: float) -> None:
        """Revoke the tokens of a subject that were issued up to a time; `expires_at` is when the last one expires."""
        known = self._marks.get(subject, (0.0, 0.0))
        self._marks[subject] = (max(until, known[0]), max(expires_at, known[1]))

    def record(self, subject: Subject, at: float, expires_at: float) -> None:
        """Record a revocation as the identity service lists it."""
        kind, *ids = revocation_subjects.parts(subject)
        if kind == "audit":
            self.revoke(ids[0], expires_at)
        else:
            self.revoke_all(subject, at, expires_at)

    def covers(self, claims: Claims) -> bool:
        """Return whether the token is revoked."""
        if any(audit_id in self._audit_ids for audit_id in claims.audit_ids):
            return True
        if not self._marks:
            return False
        return any(claims.issued_at <= self._marks.get(subject, (0.0, 0.0))[0] for subject in _subjects(claims))

    def forget_expired(self, now: float) -> None:
        """Drop entries about tokens that have expired."""
        self._audit_ids = {key: until for key, until in self._audit_ids.items() if until > now}
        self._marks = {key: times for key, times in self._marks.items() if times[1] > now}


def _subjects(claims: Claims) -> list[Subject]:
    """Return the subjects of the revocations that concern a token, besides its audit ids."""
    target = claims.project_id or claims.domain_id or ("system" if claims.system else "")
    users = [(claims.user_id, claims.user_domain_id), *claims.trust_agents]
    if claims.trust_user_id is not None and claims.trust_user_domain_id is not None:
        users.append((claims.trust_user_id, claims.trust_user_domain_id))
    subjects: list[Subject] = []
    for user_id, domain_id in users:  # a token for a trust is void if any party loses what the trust is made of
        subjects += (
            revocation_subjects.user(user_id),
            revocation_subjects.grant(user_id, target),
            revocation_subjects.domain(domain_id),
        )
    if claims.project_id is not None:
        subjects.append(revocation_subjects.project(claims.project_id))
    scope_domain_id = claims.project_domain_id or claims.domain_id
    if scope_domain_id is not None:
        subjects.append(revocation_subjects.domain(scope_domain_id))
    if claims.application_credential_id is not None:
        subjects.append(revocation_subjects.application_credential(claims.application_credential_id))
    if claims.trust_id is not None:
        subjects.append(revocation_subjects.trust(claims.trust_id))
    return subjects


class TokenVerifier:
    """Verifies tokens with the public keys alone, and caches the verified ones."""

    def __init__(self, public_keys: Iterable[bytes], revocations: Revocations, max_entries: int = 4096) -> None:
        self.revocations = revocations
        self._max_entries = max_entries
        self._known: dict[str, Claims] = {}
        self.use(public_keys)

    def use(self, public_keys: Iterable[bytes]) -> None:
        """Verify tokens with these keys from now on."""
        self._keys = {key_id(key): Ed25519PublicKey.from_public_bytes(key) for key in public_keys}
        self._known.clear()

    def verify(self, token: str, now: float, *, allow_expired: bool = False) -> Claims:
        """Return the token's claims; raise Unauthorized when it is forged, expired or revoked."""
        claims = self._known.get(token)
        if claims is None:
            claims = self._decode(token)
            if len(self._known) >= self._max_entries:
                self._known.clear()
            self._known[token] = claims
        if (claims.expires_at <= now and not allow_expired) or self.revocations.covers(claims):
            raise Unauthorized("The token has expired or was revoked; ask for a new one.")
        return claims

    def _decode(self, token: str) -> Claims:
        if not is_signed(token) or len(token) > LONGEST:
            raise Unauthorized("The token is not valid.")
        prefix, text = token[: len(PREFIX)], token[len(PREFIX) :]
        try:
            data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            payload, signature = data[:-_SIGNATURE], data[-_SIGNATURE:]
            claims = msgspec.msgpack.decode(payload, type=Claims)
            if prefix != _prefix(claims):
                raise ValueError
        except (binascii.Error, ValueError, msgspec.MsgspecError):
            raise Unauthorized("The token is not valid.") from None
        if claims.key_id and claims.key_id not in self._keys:
            raise UnknownKey("The token is signed by a key that is not known, or not any more; ask for a new one.")
        for key in [self._keys[claims.key_id]] if claims.key_id else self._keys.values():
            try:
                key.verify(signature, _signed(claims, payload))
            except InvalidSignature:
                continue
            return claims
        raise Unauthorized("The token is not valid.")


class TokenSigner:
    """Makes tokens; only the identity service has the private keys."""

    def __init__(self, keys: Sequence[TokenKey]) -> None:
        self.use(keys)

    def use(self, keys: Sequence[TokenKey]) -> None:
        """Sign with these keys from now on, each from its time."""
        self._keys = [
            (key.since, key_id(key.public), Ed25519PrivateKey.from_private_bytes(key.private))
            for key in sorted(keys, key=lambda key: key.since)
        ]

    def sign(self, claims: Claims) -> str:
        """Return a token with these claims, signed by the newest key that was to sign when it was issued."""
        signing = [key for key in self._keys if key[0] <= claims.issued_at] or self._keys[:1]
        _, id, private = signing[-1]
        payload = msgspec.msgpack.encode(msgspec.structs.replace(claims, key_id=id))
        signature = private.sign(_signed(claims, payload))
        return _prefix(claims) + base64.urlsafe_b64encode(payload + signature).decode().rstrip("=")


def is_signed(token: str) -> bool:
    """Return whether a token is one that the embedded identity service signs."""
    return token.startswith((PREFIX, PREFIX_WITH_RULES))


def _prefix(claims: Claims) -> str:
    return PREFIX if claims.access_rules is None else PREFIX_WITH_RULES


def _signed(claims: Claims, payload: bytes) -> bytes:
    """Return what the signature is of: with access rules, of the prefix, too."""
    return payload if claims.access_rules is None else PREFIX_WITH_RULES.encode() + payload
