"""Resource classes: kinds of resources, by OpenStack's names and by names that the cloud adds."""

from functools import partial
from typing import Any

from micronova.api.placement import json_schema, schemas
from micronova.api.placement.service import Answers, path_of
from micronova.db import placement_names
from micronova.db.engine import Database
from micronova.http.request import Request, Response
from micronova.http.service import Route
from micronova.http.versions import Range, since
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict, Invalid, NotFound

_ONE = {"name": str, "links": [{"rel": str, "href": str}]}


def _shown(request: Request, name: str) -> dict[str, Any]:
    return {"name": name, "links": [{"rel": "self", "href": path_of(request, f"/resource_classes/{name}")}]}


class ResourceClasses:
    """The handlers."""

    def __init__(self, database: Database, clock: Clock, answers: Answers) -> None:
        self._database = database
        self._clock = clock
        self._answers = answers

    async def index(self, request: Request) -> Response:
        """List the resource classes."""
        found = await self._database.read(placement_names.list_classes)
        newest = max((at for at in found.values() if at is not None), default=None)
        return self._answers.make(request, {"resource_classes": [_shown(request, name) for name in found]}, newest)

    async def create(self, request: Request) -> Response:
        """Add a custom resource class."""
        name = request.body["name"]
        if not await self._database.write(placement_names.create_class, name, micros(self._clock.now())):
            raise Conflict(f"Conflicting resource class already exists: {name}")
        return Response(headers={"location": f"{request.base_url}/resource_classes/{name}"})

    async def show(self, request: Request, name: str) -> Response:
        """Show a resource class."""
        known, created_at = await self._database.read(placement_names.find_class, name)
        if not known:
            raise NotFound(f"No such resource class {name}.")
        return self._answers.make(request, _shown(request, name), created_at)

    async def rename(self, request: Request, name: str) -> Response:
        """Rename a custom resource class, before 1.7."""
        new = request.body["name"]
        await self._database.write(placement_names.rename_class, name, new)
        return Response(body=_shown(request, new))

    async def ensure(self, request: Request, name: str) -> Response:
        """Add a custom resource class; if there is one already, answer 204."""
        try:
            json_schema.check({"name": name}, schemas.resource_class(request.minor))
        except Invalid as error:
            raise Invalid(f"JSON does not validate: {error.message}") from None
        now = micros(self._clock.now())
        new = await self._database.write(placement_names.create_class, name, now)
        where = f"{request.base_url}/resource_classes/{name}"
        return Response(status=201 if new else 204, headers={"location": where})

    async def delete(self, request: Request, name: str) -> None:
        """Remove a custom resource class of which no provider has any."""
        await self._database.write(placement_names.delete_class, name)


def routes(database: Database, clock: Clock, answers: Answers) -> list[Route]:
    """Declare the routes of resource classes."""
    handlers = ResourceClasses(database, clock, answers)
    rule = "placement:resource_classes"
    all_: Any = partial(Route, path="/resource_classes", versions=since(2))
    one: Any = partial(Route, path="/resource_classes/{name}")
    update = f"{rule}:update"
    return [
        all_(method="GET", handler=handlers.index, policy=f"{rule}:list", answer={"resource_classes": [_ONE]}),
        all_(method="POST", handler=handlers.create, policy=f"{rule}:create", body=schemas.resource_class, status=201),
        one(method="GET", handler=handlers.show, policy=f"{rule}:show", versions=since(2), answer=_ONE),
        one(
            method="PUT",
            handler=handlers.rename,
            policy=update,
            versions=Range(2, 6),
            body=schemas.resource_class,
            answer=_ONE,
        ),
        one(method="PUT", handler=handlers.ensure, policy=update, versions=since(7), status=201, also={204: None}),
        one(method="DELETE", handler=handlers.delete, policy=f"{rule}:delete", versions=since(2), status=204),
    ]
