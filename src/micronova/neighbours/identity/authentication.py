"""Proving who one is: passwords, tokens and application credentials.

A failure says nothing about which part was wrong, and an unknown user costs as much time as a known one.
"""

from typing import Any, Literal

import sqlalchemy as sa
from msgspec import Struct

from micronova.http.tokens import Claims
from micronova.neighbours.identity.core import Core
from micronova.neighbours.identity.store import application_credentials
from micronova.neighbours.identity.store.rows import Row
from micronova.neighbours.identity.tables import domains, users
from micronova.objects.errors import Forbidden, Invalid, MicronovaError, Unauthorized

METHODS = ("password", "token", "application_credential")
_WITH_DOMAIN = sa.select(users, domains.c.enabled.label("domain_enabled")).where(domains.c.id == users.c.domain_id)


class DomainRef(Struct):
    """A domain, by id or by name."""

    id: str | None = None
    name: str | None = None


class UserRef(Struct):
    """A user, by id, or by name and domain."""

    id: str | None = None
    name: str | None = None
    domain: DomainRef | None = None


class PasswordUser(UserRef):
    """A user with its password."""

    password: str | None = None


class PasswordProof(Struct):
    """The password method's part of the body."""

    user: PasswordUser


class TokenProof(Struct):
    """The token method's part of the body."""

    id: str


class CredentialProof(Struct):
    """The application credential method's part of the body."""

    id: str | None = None
    name: str | None = None
    user: UserRef | None = None
    secret: str | None = None


class Identity(Struct):
    """How the caller proves who it is."""

    methods: list[str]
    password: PasswordProof | None = None
    token: TokenProof | None = None
    application_credential: CredentialProof | None = None


class ProjectRef(Struct):
    """A project, by id, or by name and domain."""

    id: str | None = None
    name: str | None = None
    domain: DomainRef | None = None


class SystemRef(Struct):
    """The system: all of it."""

    all: bool = False


class Scope(Struct, forbid_unknown_fields=True):
    """What the token shall be for."""

    project: ProjectRef | None = None
    domain: DomainRef | None = None
    system: SystemRef | None = None
    unscoped: dict[str, Any] | None = None


class Auth(Struct):
    """A request for a token."""

    identity: Identity
    scope: Scope | Literal["unscoped"] | None = None


class AuthBody(Struct):
    """The body of POST /v3/auth/tokens."""

    auth: Auth


class Proven(Struct):
    """Who the caller is, and by what."""

    user: Row
    methods: tuple[str, ...]
    parent: Claims | None = None  # the token that this one is made from
    credential: Row | None = None  # the application credential that was used


def refused() -> MicronovaError:
    """Return the one error for whatever was wrong with the credentials or the scope."""
    return Unauthorized("Authentication failed: the credentials, or the right to this scope, could not be confirmed.")


def domain_id_of(conn: sa.Connection, ref: DomainRef | None, inside: str) -> str | None:
    """Return the id of a domain that is named; whether there is one with an id that is given is not looked at."""
    if ref is None or (ref.id is None and ref.name is None):
        raise Invalid(f"Invalid input for field/attribute auth: name the domain in {inside}, by id or by name.")
    if ref.id is not None:
        return ref.id
    return conn.execute(sa.select(domains.c.id).where(domains.c.name == ref.name)).scalar()


def _find_user(conn: sa.Connection, ref: UserRef) -> Row | None:
    """Return the user with its domain's state as `domain_enabled`."""
    if ref.id is not None:
        chosen = [users.c.id == ref.id]
    elif ref.name is not None:
        chosen = [users.c.domain_id == domain_id_of(conn, ref.domain, "user"), users.c.name == ref.name]
    else:
        raise Invalid("Invalid input for field/attribute auth.identity: name the user, by id, or by name and domain.")
    return conn.execute(_WITH_DOMAIN.where(*chosen)).mappings().first()


def _find_credential(conn: sa.Connection, proof: CredentialProof) -> tuple[Row | None, Row | None]:
    if proof.id is not None:
        credential = application_credentials.find(conn, proof.id)
        user = _find_user(conn, UserRef(id=credential["user_id"])) if credential else None
    elif proof.name is not None and proof.user is not None:
        user = _find_user(conn, proof.user)
        credential = application_credentials.by_name(conn, user["id"], proof.name) if user else None
    else:
        raise Invalid(
            "Invalid input for field/attribute auth.identity.application_credential: give its id, or its name and user."
        )
    return credential, user


def _active(user: Row | None) -> bool:
    return user is not None and user["enabled"] and user["domain_enabled"]


async def prove(core: Core, identity: Identity, address: str) -> Proven:
    """Check every method that the caller names; all must be about the same user."""
    if not identity.methods:
        raise refused()
    proven: list[Proven] = []
    for method in dict.fromkeys(identity.methods):
        if method not in METHODS:
            raise Unauthorized(f"Unsupported authentication method; supported are {', '.join(METHODS)}.")
        if getattr(identity, method) is None:
            raise Invalid(f"Invalid input for field/attribute auth.identity: {method} is missing.")
        if method == "password":
            assert identity.password is not None
            user = await check_password(core, identity.password.user, identity.password.user.password, address)
            proven.append(Proven(user, ("password",)))
        elif method == "token":
            assert identity.token is not None
            proven.append(await _token(core, identity.token))
        else:
            assert identity.application_credential is not None
            proven.append(await _credential(core, identity.application_credential, address))
    first = proven[0]
    if any(each.user["id"] != first.user["id"] for each in proven):
        raise refused()
    methods = tuple(dict.fromkeys(method for each in proven for method in each.methods))
    parent = next((each.parent for each in proven if each.parent), None)
    credential = next((each.credential for each in proven if each.credential), None)
    return Proven(first.user, methods, parent, credential)


async def check_password(core: Core, ref: UserRef, password: str | None, address: str) -> Row:
    """Return the user whose password this is."""
    user = await core.read(_find_user, ref)
    domain = ref.domain or DomainRef()
    key = (user["id"] if user else (ref.id, ref.name, domain.id, domain.name), address)
    stored = user["password_hash"] if user else None
    exempt = bool(user and user["options"].get("ignore_lockout_failure_attempts"))
    await _check(core, key, stored, password, exempt)
    if user is None or not _active(user):
        raise refused()
    return user


async def _check(core: Core, key: Any, stored: str | None, secret: str | None, exempt: bool = False) -> None:
    """Check a secret, unless there were too many failures; count one."""
    lockout = core.lockout

    def locked() -> bool:
        return not exempt and lockout.locked(key)

    if locked():
        raise refused()
    if not await core.passwords.check(stored, secret or "", locked):
        if not locked():
            lockout.failed(key)
        raise refused()
    lockout.succeeded(key)


async def _token(core: Core, proof: TokenProof) -> Proven:
    claims = core.verifier.verify(proof.id, core.clock.now())
    if claims.application_credential_id is not None:
        raise Forbidden("A token that was got with an application credential cannot be exchanged for another.")
    user = await core.read(_find_user, UserRef(id=claims.user_id))
    if user is None or not _active(user):
        raise refused()
    methods = (*(method for method in claims.methods if method != "token"), "token")
    return Proven(user, methods, parent=claims)


async def _credential(core: Core, proof: CredentialProof, address: str) -> Proven:
    credential, user = await core.read(_find_credential, proof)
    ref = proof.user or UserRef()
    key = (credential["id"] if credential else (proof.id, proof.name, ref.id, ref.name), address)
    await _check(core, key, credential["secret_hash"] if credential else None, proof.secret)
    if credential is None or user is None or not _active(user):
        raise refused()
    if credential["expires_at"] is not None and credential["expires_at"] <= core.now:
        raise refused()
    return Proven(user, ("application_credential",), credential=credential)
