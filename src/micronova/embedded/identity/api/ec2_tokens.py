"""/v3/ec2tokens: a service that received a request with an EC2 signature gets a token of the user who signed it."""

import msgspec
from msgspec import Struct

from micronova.embedded.identity import ec2_signatures, tokens
from micronova.embedded.identity.api.common import V3, token_response
from micronova.embedded.identity.api.credentials import EC2, EC2Blob, id_of
from micronova.embedded.identity.authentication import (
    EC2_METHOD,
    Authenticated,
    ProjectRef,
    Scope,
    UserRef,
    find_user,
    is_active,
    refused,
)
from micronova.embedded.identity.core import Core
from micronova.embedded.identity.ec2_signatures import SignedRequest
from micronova.embedded.identity.store.kinds import CREDENTIALS
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.objects.errors import NotFound, Unauthorized


class EC2TokensBody(Struct):
    """A signed request, under one of the names that services use."""

    credentials: SignedRequest | None = None
    credential: SignedRequest | None = None
    ec2Credentials: SignedRequest | None = None  # noqa: N815 - a name of the API


class EC2TokensAPI:
    """Tokens for EC2 signatures."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        rule = "identity:ec2tokens_validate"
        return [Route(method="POST", path=f"{V3}/ec2tokens", handler=self.issue, policy=rule, body=EC2TokensBody)]

    async def issue(self, request: Request) -> Response:
        """Issue a token to the user who signed a request, for the project of the credential."""
        core, body = self._core, request.body
        signed: SignedRequest | None = body.credentials or body.credential or body.ec2Credentials
        if signed is None or not signed.access:
            raise Unauthorized("The EC2 signature is missing.")
        issued_at = core.timestamps.next()
        row = await core.database.read(CREDENTIALS.find, id_of(signed.access))
        if row is None or row["type"].lower() != EC2:
            raise NotFound("The EC2 access key was not found.")
        blob = msgspec.json.decode(core.blobs.open(row["blob"], row["id"]), type=EC2Blob)
        secret = blob.secret
        # With one of these, the credential was made through a trust, an application credential or OAuth. This service
        # makes none of these, and cannot check their limits.
        delegated = blob.trust_id or blob.app_cred_id or blob.access_token_id
        if not isinstance(secret, str) or not secret or delegated:
            raise refused()
        ec2_signatures.check(signed, secret, core.clock.now())
        user = await core.database.read(find_user, UserRef(id=row["user_id"]))
        if not is_active(user):
            raise refused()
        scope = Scope(project=ProjectRef(id=row["project_id"]))
        token, claims, details = await tokens.issue(core, Authenticated(user, (EC2_METHOD,)), scope, True, issued_at)
        return token_response(self._core, request, token, claims, details, with_catalog=True)
