"""Extra specs of flavors: what a flavor requires of a host besides its size."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from msgspec import Meta

from micronova.api.compute.flavors import announce_update
from micronova.api.inputs import STRICT, Body, Key, NoQuery
from micronova.db import flavors
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.notifications.notifier import Announcer
from micronova.objects.errors import Invalid, NotFound
from micronova.servers import extra_spec_rules

Value = Annotated[str, Meta(max_length=255)] | int | float
Specs = dict[Key, Value]


class Create(Body):
    """Specs to add or change."""

    extra_specs: Specs


OneSpec = Annotated[Specs, Meta(min_length=1, max_length=1)]
OneText = Annotated[dict[str, str], Meta(min_length=1, max_length=1)]


def _checked(specs: Mapping[str, str | int | float], minor: int) -> dict[str, str]:
    texts = {name: str(value) for name, value in specs.items()}
    for name, text in texts.items():
        if len(text) > 255:
            raise Invalid(f"Invalid input for field/attribute {name}: it may have 255 characters.")
        if minor >= 86:
            extra_spec_rules.check(name, text)
    return texts


class FlavorExtraSpecs:
    """The handlers."""

    def __init__(self, database: Database, notifier: Announcer) -> None:
        self._database = database
        self._notifier = notifier

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List a flavor's extra specs."""
        return {"extra_specs": await self._specs(request, id)}

    async def show(self, request: Request, id: str, key: str) -> dict[str, Any]:
        """Show one extra spec."""
        specs = await self._specs(request, id)
        if key not in specs:
            raise NotFound(f"Flavor {id} has no extra specs with key {key}.")
        return {key: specs[key]}

    async def _specs(self, request: Request, id: str) -> dict[str, str]:
        project = None if request.context.is_admin else request.context.project_id
        specs: dict[str, str] = (await self._database.read(flavors.row, id, project)).extra_specs
        return specs

    async def create(self, request: Request, id: str) -> dict[str, Any]:
        """Add or change extra specs."""
        specs = _checked(request.body.extra_specs, request.minor)
        await self._database.write(flavors.set_extra_specs, id, specs)
        await announce_update(self._notifier, self._database, request, id)
        return {"extra_specs": specs}

    async def update(self, request: Request, id: str, key: str) -> dict[str, Any]:
        """Change one extra spec."""
        specs = _checked(request.body, request.minor)
        if key not in specs:
            raise Invalid(f"Request body and URI mismatch: the body must have the key {key}.")
        await self._database.write(flavors.set_extra_specs, id, specs)
        await announce_update(self._notifier, self._database, request, id)
        return specs

    async def delete(self, request: Request, id: str, key: str) -> None:
        """Delete one extra spec."""
        await self._database.write(flavors.remove_extra_spec, id, key)
        await announce_update(self._notifier, self._database, request, id)


def routes(database: Database, notifier: Announcer) -> list[Route]:
    """Declare the routes of extra specs."""
    handlers = FlavorExtraSpecs(database, notifier)
    all_specs, one = "/flavors/{id}/os-extra_specs", "/flavors/{id}/os-extra_specs/{key}"
    rule = "os_compute_api:os-flavor-extra-specs"
    specs = {"extra_specs": dict[str, str]}
    read = partial(Route, method="GET", query=NoQuery, strict_query=STRICT)
    return [
        read(path=all_specs, handler=handlers.index, policy=f"{rule}:index", answer=specs),
        read(path=one, handler=handlers.show, policy=f"{rule}:show", answer=OneText),
        Route(
            method="POST", path=all_specs, handler=handlers.create, policy=f"{rule}:create", body=Create, answer=specs
        ),
        Route(method="PUT", path=one, handler=handlers.update, policy=f"{rule}:update", body=OneSpec, answer=OneText),
        Route(method="DELETE", path=one, handler=handlers.delete, policy=f"{rule}:delete"),
    ]
