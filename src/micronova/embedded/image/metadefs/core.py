"""What the handlers of metadata definitions share: loading a namespace for a caller."""

from micronova.embedded.image.core import Core
from micronova.embedded.image.metadefs import queries
from micronova.embedded.image.metadefs.model import Namespace
from micronova.http.request import Request


async def load(core: Core, request: Request, name: str, rule: str | None = None) -> Namespace:
    """Return a namespace; raise NotFound if the caller may not see it, Forbidden if the rule does not allow it."""
    found = await core.database.read(queries.get, name)
    if found is None or not found.is_visible_to(request.context.project_id, request.context.is_admin):
        raise queries.no_namespace(name)
    if not request.allows(found.target(), "get_metadef_namespace"):
        raise queries.no_namespace(name)
    request.authorize(found.target(), rule)
    return found
