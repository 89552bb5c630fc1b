"""Tokens that tests of the embedded services write themselves."""

import msgspec

from micronova.objects.context import RequestContext
from micronova.objects.errors import Unauthorized


class Tokens:
    """An authenticator: a token is USER@PROJECT/ROLES; without roles the user is a member."""

    async def authenticate(self, token: str | None, context: RequestContext) -> RequestContext:
        if not token or "@" not in token:
            raise Unauthorized("No token.")
        who, _, roles = token.partition("/")
        user, _, project = who.partition("@")
        return msgspec.structs.replace(
            context, user_id=user, project_id=project, roles=tuple((roles or "member,reader").split(",")), token=token
        )
