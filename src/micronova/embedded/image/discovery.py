"""Version documents, schemas, import methods, stores and usage."""

from typing import Any

from micronova.embedded.image import queries
from micronova.embedded.image.attributes import SCHEMAS
from micronova.embedded.image.core import Core
from micronova.embedded.image.metadefs.schemas import SCHEMAS as METADEF_SCHEMAS
from micronova.embedded.image.model import IMPORT_METHODS, STORE
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.objects.errors import NotFound

NEWEST = 17  # the minor version of v2


class DiscoveryHandlers:
    """The handlers that tell clients about the service."""

    def __init__(self, core: Core, project_bytes: int | None, project_images: int | None) -> None:
        self._core = core
        self._project_bytes = project_bytes
        self._project_images = project_images

    def routes(self) -> list[Route]:
        """Return the routes."""
        detail = "/v2/info/stores/detail"
        return [
            Route(method="GET", path="", handler=self.versions, policy=None, status=300, name="versions"),
            Route(method="GET", path="/versions", handler=self.versions, policy=None),
            Route(method="GET", path="/versions/", handler=self.versions, policy=None),
            Route(method="GET", path="/v2", handler=self.versions, policy=None, status=300),
            Route(method="GET", path="/v2/", handler=self.versions, policy=None, status=300),
            Route(method="GET", path="/v2/schemas/{name}", handler=self.schema, policy="default"),
            Route(method="GET", path="/v2/schemas/metadefs/{name}", handler=self.metadef_schema, policy="default"),
            Route(method="GET", path="/v2/info/import", handler=self.imports, policy="default"),
            Route(method="GET", path="/v2/info/stores", handler=self.stores, policy="default"),
            Route(method="GET", path=detail, handler=self.stores_detail, policy="stores_info_detail"),
            Route(method="GET", path="/v2/info/usage", handler=self.usage, policy="default"),
        ]

    async def versions(self, request: Request) -> Response:
        """List the versions, the newest first."""
        links = [{"rel": "self", "href": f"{request.base_url}/v2/"}]
        versions = [
            {"id": f"v2.{minor}", "status": "CURRENT" if minor == NEWEST else "SUPPORTED", "links": links}
            for minor in range(NEWEST, -1, -1)
        ]
        return Response(body={"versions": versions})

    async def schema(self, request: Request, name: str) -> dict[str, Any]:
        """Show the schema of an image, a member, a task, or a list of them."""
        if name not in SCHEMAS:
            raise NotFound(f"There is no schema '{name[:64]}'; there are {', '.join(SCHEMAS)}.")
        return SCHEMAS[name]

    async def metadef_schema(self, request: Request, name: str) -> dict[str, Any]:
        """Show the schema of a metadata definition, or of a list of them."""
        if name not in METADEF_SCHEMAS:
            raise NotFound(f"There is no schema 'metadefs/{name[:64]}'; there are {', '.join(METADEF_SCHEMAS)}.")
        return METADEF_SCHEMAS[name]

    async def imports(self, request: Request) -> dict[str, Any]:
        """Show the import methods."""
        about = "The ways to import an image."
        return {"import-methods": {"type": "array", "description": about, "value": list(IMPORT_METHODS)}}

    async def stores(self, request: Request) -> dict[str, Any]:
        """List the stores, of which there is one."""
        return {"stores": [{"id": STORE, "default": "true"}]}

    async def stores_detail(self, request: Request) -> dict[str, Any]:
        """List the stores with details."""
        return {"stores": [{"id": STORE, "default": "true", "type": "file", "properties": {}}]}

    async def usage(self, request: Request) -> dict[str, Any]:
        """Show how much image data and how many images the project has, and how much it may have (-1: no limit)."""
        project = request.context.project_id
        used = await self._core.database.read(queries.used, project)
        images = await self._core.database.read(queries.count, project)
        limit = -1 if self._project_bytes is None else self._project_bytes >> 20
        most = -1 if self._project_images is None else self._project_images
        return {
            "usage": {
                "image_size_total": {"limit": limit, "usage": -(-used // (1 << 20))},
                "image_count_total": {"limit": most, "usage": images},
            }
        }
