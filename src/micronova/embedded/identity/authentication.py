"""Authentication by password, by token and by application credential.

An error does not say which part was wrong, and an unknown user takes as much time to refuse as a known one. A token
that is not valid and an application credential's id that nobody has are not found (404), as in Keystone: nobody can
guess them.
"""

from collections.abc import Hashable
from typing import Any, Literal, TypeGuard, cast

import sqlalchemy as sa
from msgspec import Struct

from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import application_credentials
from micronova.embedded.identity.store.kinds import APPLICATION_CREDENTIALS, ApplicationCredentialRow, UserRow
from micronova.embedded.identity.tables import domains, users
from micronova.http.addresses import client_network
from micronova.http.tokens import Claims
from micronova.objects.errors import Forbidden, Invalid, MicronovaError, NotFound, Unauthorized

METHODS = ("password", "token", "application_credential")
EC2_METHOD = "ec2credential"  # of tokens that were issued for the signature of an EC2 credential
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


class PasswordMethod(Struct):
    """The password method's part of the body."""

    user: PasswordUser


class TokenMethod(Struct):
    """The token method's part of the body."""

    id: str


class ApplicationCredentialMethod(Struct):
    """The application credential method's part of the body."""

    id: str | None = None
    name: str | None = None
    user: UserRef | None = None
    secret: str | None = None


class Identity(Struct):
    """The methods that the caller uses, each with its part of the body."""

    methods: list[str]
    password: PasswordMethod | None = None
    token: TokenMethod | None = None
    application_credential: ApplicationCredentialMethod | None = None


class ProjectRef(Struct):
    """A project, by id, or by name and domain."""

    id: str | None = None
    name: str | None = None
    domain: DomainRef | None = None


class SystemRef(Struct):
    """The scope of the whole system."""

    all: bool = False


class TrustRef(Struct):
    """A trust, by id."""

    id: str


class Scope(Struct, forbid_unknown_fields=True, rename={"trust": "OS-TRUST:trust"}):
    """The scope that the token is to have."""

    project: ProjectRef | None = None
    domain: DomainRef | None = None
    system: SystemRef | None = None
    trust: TrustRef | None = None
    unscoped: dict[str, Any] | None = None


class Auth(Struct):
    """How the caller authenticates, and the scope of the token that it asks for."""

    identity: Identity
    scope: Scope | Literal["unscoped"] | None = None


class AuthBody(Struct):
    """The body of POST /v3/auth/tokens."""

    auth: Auth


class UserWithDomain(UserRow):
    """A row of `users`, with whether the domain is enabled."""

    domain_enabled: bool


class Authenticated(Struct):
    """A user who has authenticated, and how."""

    user: UserRow
    methods: tuple[str, ...]
    parent: Claims | None = None  # the token that was used
    application_credential: ApplicationCredentialRow | None = None  # the one that was used


def refused() -> MicronovaError:
    """Return the error for wrong credentials or a scope without roles; it does not say which."""
    return Unauthorized("Authentication failed: the credentials, or the right to this scope, could not be confirmed.")


def domain_id_of(conn: sa.Connection, ref: DomainRef | None, inside: str) -> str | None:
    """Return the id of a domain: the given id, which is not checked, or the id of the domain with the given name."""
    if ref is None or (ref.id is None and ref.name is None):
        raise Invalid(f"Invalid input for field/attribute auth: name the domain in {inside}, by id or by name.")
    if ref.id is not None:
        return ref.id
    return conn.execute(sa.select(domains.c.id).where(domains.c.name == ref.name)).scalar()


def find_user(conn: sa.Connection, ref: UserRef) -> UserWithDomain | None:
    """Return the user, with whether its domain is enabled as `domain_enabled`."""
    if ref.id is not None:
        chosen = [users.c.id == ref.id]
    elif ref.name is not None:
        chosen = [users.c.domain_id == domain_id_of(conn, ref.domain, "user"), users.c.name == ref.name]
    else:
        raise Invalid("Invalid input for field/attribute auth.identity: name the user, by id, or by name and domain.")
    return cast(UserWithDomain | None, conn.execute(_WITH_DOMAIN.where(*chosen)).mappings().first())


def _find_application_credential(
    conn: sa.Connection, method: ApplicationCredentialMethod
) -> tuple[ApplicationCredentialRow | None, UserWithDomain | None]:
    if method.id is not None:
        application_credential = APPLICATION_CREDENTIALS.find(conn, method.id)
        user = find_user(conn, UserRef(id=application_credential["user_id"])) if application_credential else None
    elif method.name is not None and method.user is not None:
        user = find_user(conn, method.user)
        application_credential = application_credentials.by_name(conn, user["id"], method.name) if user else None
    else:
        raise Invalid(
            "Invalid input for field/attribute auth.identity.application_credential: give its id, or its name and user."
        )
    return application_credential, user


def is_active(user: UserWithDomain | None) -> TypeGuard[UserWithDomain]:
    """Return whether a user exists, is enabled, and is in an enabled domain."""
    return user is not None and user["enabled"] and user["domain_enabled"]


async def authenticate(core: Core, identity: Identity, address: str) -> Authenticated:
    """Check every method that the caller names; raise an error unless all succeed for the same user."""
    if not identity.methods:
        raise refused()
    found: list[Authenticated] = []
    for method in dict.fromkeys(identity.methods):
        if method not in METHODS:
            raise Unauthorized(f"Unsupported authentication method; supported are {', '.join(METHODS)}.")
        if getattr(identity, method) is None:
            raise Invalid(f"Invalid input for field/attribute auth.identity: {method} is missing.")
        if method == "password":
            assert identity.password is not None
            user = await check_password(core, identity.password.user, identity.password.user.password, address)
            found.append(Authenticated(user, ("password",)))
        elif method == "token":
            assert identity.token is not None
            found.append(await _authenticate_token(core, identity.token))
        else:
            assert identity.application_credential is not None
            found.append(await _authenticate_application_credential(core, identity.application_credential, address))
    first = found[0]
    if any(each.user["id"] != first.user["id"] for each in found):
        raise refused()
    methods = tuple(dict.fromkeys(method for each in found for method in each.methods))
    parent = next((each.parent for each in found if each.parent), None)
    application_credential = next((each.application_credential for each in found if each.application_credential), None)
    return Authenticated(first.user, methods, parent, application_credential)


async def check_password(core: Core, ref: UserRef, password: str | None, address: str) -> UserRow:
    """Return the user if the password is right; raise Unauthorized."""
    user = await core.database.read(find_user, ref)
    domain = ref.domain or DomainRef()
    who = user["id"] if user else (ref.id, ref.name, domain.id, domain.name)
    stored = user["password_hash"] if user else None
    exempt = bool(user and user["options"].get("ignore_lockout_failure_attempts"))
    await _check_secret(core, who, address, stored, password, exempt)
    if not is_active(user):
        raise refused()
    return user


async def _check_secret(
    core: Core, who: Hashable, address: str, stored: str | None, secret: str | None, exempt: bool = False
) -> None:
    """Raise Unauthorized if a secret is wrong, or after too many failures of the client for `who`; count a failure."""
    lockout = core.lockout
    key = (who, client_network(address))

    def locked() -> bool:
        return not exempt and lockout.locked(key)

    if locked():
        raise refused()
    if not await core.passwords.check(stored, secret or "", locked, address):
        if not locked():
            lockout.failed(key)
        raise refused()
    lockout.succeeded(key)


async def _authenticate_token(core: Core, method: TokenMethod) -> Authenticated:
    try:
        claims = core.verifier.verify(method.id, core.clock.now())
    except Unauthorized as error:
        raise NotFound(error.message) from None
    if claims.application_credential_id is not None:
        raise Forbidden("A token that was obtained with an application credential cannot be exchanged for another.")
    if claims.trust_id is not None:
        raise Forbidden("A token for a trust cannot be exchanged for another.")
    if EC2_METHOD in claims.methods:
        raise Forbidden("A token for an EC2 signature cannot be exchanged for another.")
    user = await core.database.read(find_user, UserRef(id=claims.user_id))
    if not is_active(user):
        raise refused()
    methods = (*(method for method in claims.methods if method != "token"), "token")
    return Authenticated(user, methods, parent=claims)


async def _authenticate_application_credential(
    core: Core, method: ApplicationCredentialMethod, address: str
) -> Authenticated:
    application_credential, user = await core.database.read(_find_application_credential, method)
    if application_credential is None and method.id is not None:
        raise APPLICATION_CREDENTIALS.not_found(method.id)
    ref = method.user or UserRef()
    who = application_credential["id"] if application_credential else (method.id, method.name, ref.id, ref.name)
    stored = application_credentials.secret_hash(application_credential) if application_credential else None
    await _check_secret(core, who, address, stored, method.secret)
    if application_credential is None or not is_active(user):
        raise refused()
    if application_credential["expires_at"] is not None and application_credential["expires_at"] <= core.now():
        raise refused()
    return Authenticated(user, ("application_credential",), application_credential=application_credential)
