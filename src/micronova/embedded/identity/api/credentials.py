"""/v3/credentials, and the credentials of EC2 under /v3/users/{user_id}/credentials/OS-EC2."""

import hashlib
import secrets
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from micronova.embedded.identity.api import views
from micronova.embedded.identity.api.common import V3, checked_route, collection, page, route
from micronova.embedded.identity.api.delegation import refuse_delegated
from micronova.embedded.identity.attributes import ID
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.store import credentials
from micronova.embedded.identity.store.kinds import CREDENTIALS, CredentialRow
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid

EC2 = "ec2"
Blob = Annotated[str, Meta(max_length=16_384)]
Type = Annotated[str, Meta(min_length=1, max_length=255)]


class CredentialAttributes(Struct, forbid_unknown_fields=True):
    """The attributes of a new credential."""

    blob: Blob
    type: Type
    user_id: ID | None = None
    project_id: ID | None = None


class CredentialBody(Struct):
    """A body that holds a credential."""

    credential: CredentialAttributes


class CredentialChanges(Struct, forbid_unknown_fields=True):
    """The attributes of a credential to change. Only the blob can change."""

    blob: Blob | UnsetType = UNSET
    type: Type | UnsetType = UNSET
    user_id: ID | UnsetType = UNSET
    project_id: ID | None | UnsetType = UNSET


class CredentialChangesBody(Struct):
    """A body that holds changes of a credential."""

    credential: CredentialChanges


class EC2Body(Struct, forbid_unknown_fields=True):
    """The body of new EC2 credentials."""

    tenant_id: ID


class EC2Blob(Struct):
    """What the blob of an EC2 credential says. Users may write any JSON into it; only the access key is checked."""

    access: Any = None
    secret: Any = None
    trust_id: Any = None
    app_cred_id: Any = UNSET
    access_token_id: Any = UNSET


class CredentialsAPI:
    """Credentials of any type."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        path, one = f"{V3}/credentials", f"{V3}/credentials/{{credential_id}}"
        return [
            route("GET", path, self.index, "list_credentials"),
            checked_route("POST", path, self.create, "create_credential", status=201, body=CredentialBody),
            checked_route("GET", one, self.show, "get_credential"),
            checked_route("PATCH", one, self.update, "update_credential", body=CredentialChangesBody),
            checked_route("DELETE", one, self.delete, "delete_credential", status=204),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List credentials: those of all users to callers that may see them, else the caller's own."""
        refuse_delegated(self._core.claims(request))
        sees_all = request.allows({"user_id": None}, "identity:get_credential")
        own = None if sees_all else request.context.user_id
        listed = await self._core.database.read(credentials.listing, request.raw_query, own, page(request))
        return collection(request, "credentials", [self._view(request, row) for row in listed.rows], listed)

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a credential, for the caller unless the body names another user."""
        wanted: CredentialAttributes = request.body.credential
        user_id = wanted.user_id or request.context.user_id
        request.authorize({"user_id": user_id})
        refuse_delegated(self._core.claims(request))
        credential_id = self._core.new_id()
        if wanted.type.lower() == EC2:
            request.authorize({"user_id": user_id}, rule="identity:ec2_create_credential")
            if wanted.project_id is None:
                raise Invalid("Invalid input for field/attribute credential.project_id: EC2 credentials need one.")
            credential_id = id_of(_access_of(wanted.blob))
        row = await self._core.write(
            credentials.create,
            {
                "id": credential_id,
                "user_id": user_id,
                "project_id": wanted.project_id,
                "type": wanted.type,
                "blob": self._core.blobs.seal(wanted.blob, credential_id),
                "created_at": self._core.now(),
            },
        )
        return {"credential": self._view(request, row)}

    async def show(self, request: Request, credential_id: str) -> dict[str, Any]:
        """Show a credential."""
        refuse_delegated(self._core.claims(request))
        return {"credential": self._view(request, await self._authorize(request, credential_id))}

    async def update(self, request: Request, credential_id: str) -> dict[str, Any]:
        """Replace the blob of a credential."""
        wanted: CredentialChanges = request.body.credential
        row = await self._authorize(request, credential_id, ec2_rule="identity:ec2_create_credential")
        refuse_delegated(self._core.claims(request))
        for name in ("type", "user_id", "project_id"):
            if getattr(wanted, name) is not UNSET and getattr(wanted, name) != row[name]:
                raise Invalid(
                    f"Invalid input for field/attribute credential.{name}: it cannot change; create another credential."
                )
        if wanted.blob is not UNSET:
            if row["type"].lower() == EC2:
                _access_of(wanted.blob)
            sealed = self._core.blobs.seal(wanted.blob, credential_id)
            row = await self._core.write(credentials.change, credential_id, sealed)
        return {"credential": self._view(request, row)}

    async def delete(self, request: Request, credential_id: str) -> None:
        """Delete a credential."""
        await self._authorize(request, credential_id, ec2_rule="identity:ec2_delete_credential")
        refuse_delegated(self._core.claims(request))
        await self._core.write(credentials.delete, credential_id)

    async def _authorize(self, request: Request, credential_id: str, ec2_rule: str | None = None) -> CredentialRow:
        """Return a credential; those of EC2 also need what their own path asks for."""
        row = await self._core.database.read(CREDENTIALS.find, credential_id)
        request.authorize({"user_id": row["user_id"] if row else None})
        if row is None:
            raise CREDENTIALS.not_found(credential_id)
        if ec2_rule is not None and row["type"].lower() == EC2:
            request.authorize({"user_id": row["user_id"]}, rule=ec2_rule)
        return row

    def _view(self, request: Request, row: CredentialRow) -> dict[str, Any]:
        return views.credential(request, row, self._core.blobs.open(row["blob"], row["id"]))


class EC2CredentialsAPI:
    """Pairs of an access key and a secret key, which the service makes."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        path = f"{V3}/users/{{user_id}}/credentials/OS-EC2"
        one = f"{path}/{{access_key}}"
        return [
            checked_route("GET", path, self.index, "ec2_list_credentials"),
            checked_route("POST", path, self.create, "ec2_create_credential", status=201, body=EC2Body),
            checked_route("GET", one, self.show, "ec2_get_credential"),
            checked_route("DELETE", one, self.delete, "ec2_delete_credential", status=204),
        ]

    async def index(self, request: Request, user_id: str) -> dict[str, Any]:
        """List a user's EC2 credentials."""
        request.authorize({"user_id": user_id})
        refuse_delegated(self._core.claims(request))
        listed = await self._core.database.read(credentials.listing, {"type": [EC2]}, user_id, page(request))
        return collection(request, "credentials", [self._view(request, row) for row in listed.rows], listed)

    async def create(self, request: Request, user_id: str) -> dict[str, Any]:
        """Make an access key and a secret key."""
        body: EC2Body = request.body
        request.authorize({"user_id": user_id})
        refuse_delegated(self._core.claims(request))
        access, secret = secrets.token_hex(16), secrets.token_hex(16)
        blob = msgspec.json.encode(EC2Blob(access, secret)).decode()
        row = await self._core.write(
            credentials.create,
            {
                "id": id_of(access),
                "user_id": user_id,
                "project_id": body.tenant_id,
                "type": EC2,
                "blob": self._core.blobs.seal(blob, id_of(access)),
                "created_at": self._core.now(),
            },
        )
        return {"credential": self._view(request, row)}

    async def show(self, request: Request, user_id: str, access_key: str) -> dict[str, Any]:
        """Show an EC2 credential."""
        refuse_delegated(self._core.claims(request))
        return {"credential": self._view(request, await self._load(request, user_id, access_key))}

    async def delete(self, request: Request, user_id: str, access_key: str) -> None:
        """Delete an EC2 credential."""
        row = await self._load(request, user_id, access_key)
        refuse_delegated(self._core.claims(request))
        await self._core.write(credentials.delete, row["id"])

    async def _load(self, request: Request, user_id: str, access_key: str) -> CredentialRow:
        request.authorize({"user_id": user_id})
        row = await self._core.database.read(CREDENTIALS.find, id_of(access_key))
        if row is None or row["user_id"] != user_id or row["type"].lower() != EC2:
            raise CREDENTIALS.not_found(access_key)
        return row

    def _view(self, request: Request, row: CredentialRow) -> dict[str, Any]:
        blob = msgspec.json.decode(self._core.blobs.open(row["blob"], row["id"]), type=EC2Blob)
        return views.ec2_credential(request, row, access=blob.access, secret=blob.secret, trust_id=blob.trust_id)


def id_of(access: str) -> str:
    """Return the id of the credential with an access key."""
    return hashlib.sha256(access.encode()).hexdigest()


def _access_of(blob: str) -> str:
    """Return the access key in a blob; raise Invalid if there is none."""
    try:
        access = msgspec.json.decode(blob, type=EC2Blob).access
    except msgspec.MsgspecError:
        access = None
    if not isinstance(access, str) or not access:
        raise Invalid(
            "Invalid input for field/attribute credential.blob: that of EC2 credentials is JSON with a key 'access'."
        )
    return access
