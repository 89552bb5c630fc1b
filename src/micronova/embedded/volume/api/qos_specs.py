"""QoS specs: limits for the I/O of volumes, which volume types are associated with."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final

from msgspec import Meta

from micronova.embedded.common.query import last
from micronova.embedded.volume.api import listing
from micronova.embedded.volume.api.listing import QUERY_RULES, Links
from micronova.embedded.volume.api.request_bodies import MOST_ITEMS, Body, Items, required_name
from micronova.embedded.volume.core import Core, retry_or_conflict
from micronova.embedded.volume.model import QosSpecs, QosSpecsColumns, VolumeTypeColumns
from micronova.embedded.volume.store import qos_queries, type_queries
from micronova.embedded.volume.tables import qos_specs
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid, NotFound

CONSUMERS: Final = ("front-end", "back-end", "both")


class SpecsBody(Body):
    """The body of a create or a change; a create has the name among the specs."""

    qos_specs: Items


class KeysBody(Body):
    """The body that removes specs."""

    keys: Annotated[list[Annotated[str, Meta(min_length=1, max_length=255)]], Meta(max_length=MOST_ITEMS)]


class QosSpecsHandlers:
    """The handlers of QoS specs."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_, one, rule = "/qos-specs", "/qos-specs/{specs_id}", "volume_extension:qos_specs_manage:"
        change = partial(Route, method="GET", status=202, policy=f"{rule}update")
        return [
            Route(method="GET", path=all_, handler=self.index, policy=f"{rule}get_all"),
            Route(method="POST", path=all_, handler=self.create, policy=f"{rule}create", body=SpecsBody),
            Route(method="GET", path=one, handler=self.show, policy=f"{rule}get"),
            Route(method="PUT", path=one, handler=self.update, policy=f"{rule}update", body=SpecsBody),
            Route(method="DELETE", path=one, handler=self.delete, policy=f"{rule}delete", status=202),
            Route(
                method="PUT",
                path=f"{one}/delete_keys",
                handler=self.delete_keys,
                policy=f"{rule}delete",
                body=KeysBody,
                status=202,
            ),
            Route(method="GET", path=f"{one}/associations", handler=self.associations, policy=f"{rule}get"),
            change(path=f"{one}/associate", handler=self.associate),
            change(path=f"{one}/disassociate", handler=self.disassociate),
            change(path=f"{one}/disassociate_all", handler=self.disassociate_all),
        ]

    async def index(self, request: Request) -> dict[str, Any]:
        """List QoS specs."""
        page = listing.read_page(request.raw_query, qos_queries.SORTABLE, self._core.settings.max_limit)
        query = request.raw_query
        conditions = [qos_specs.c[name].in_(query[name]) for name in ("id", "name", "consumer") if name in query]
        found = await self._core.database.read(qos_queries.list_qos_specs, page, conditions)
        return listing.answer(request, "qos_specs", "qos-specs", found, _view)

    async def create(self, request: Request) -> dict[str, Any]:
        """Create QoS specs."""
        given = dict(request.body.qos_specs)
        if "name" not in given:
            raise Invalid("Invalid input for field/attribute qos_specs: the name is missing.")
        made = QosSpecs(
            id=self._core.new_id(),
            name=required_name(given.pop("name")),
            consumer=_consumer(given.pop("consumer", "back-end")),
            specs=given,
            created_at=self._core.now(),
            updated_at=None,
            revision=1,
        )
        await self._core.database.write(qos_queries.insert, made)
        return self._shown(request, made)

    async def show(self, request: Request, specs_id: str) -> dict[str, Any]:
        """Show QoS specs."""
        return self._shown(request, await self._load(specs_id))

    def _shown(self, request: Request, found: QosSpecs) -> dict[str, Any]:
        return {"qos_specs": _view(found), "links": Links(request).of("qos-specs", found.id)}

    async def update(self, request: Request, specs_id: str) -> dict[str, Any]:
        """Add specs, and replace those of the same names."""
        given = dict(request.body.qos_specs)
        if "name" in given:
            raise Invalid("The name of QoS specs cannot be changed.")

        def change(old: QosSpecs) -> QosSpecsColumns:
            rest = {key: value for key, value in given.items() if key != "consumer"}
            specs = {**old.specs, **rest}
            if len(specs) > MOST_ITEMS:
                raise Invalid(f"QoS specs may have at most {MOST_ITEMS} items.")
            return {"specs": specs, "consumer": _consumer(given.get("consumer", old.consumer))}

        await self._change(specs_id, change)
        return {"qos_specs": given}

    async def delete_keys(self, request: Request, specs_id: str) -> None:
        """Remove specs."""
        keys: list[str] = request.body.keys

        def change(old: QosSpecs) -> QosSpecsColumns:
            missing = [key for key in keys if key not in old.specs]
            if missing:
                raise NotFound(f"QoS specs {specs_id} has no spec with key {missing[0][:64]}.")
            return {"specs": {key: value for key, value in old.specs.items() if key not in keys}}

        await self._change(specs_id, change)

    async def delete(self, request: Request, specs_id: str) -> None:
        """Delete QoS specs; those in use only by force, which ends the associations."""
        text = last(request.raw_query, "force")
        force = text is not None and QUERY_RULES.boolean("force", text)

        async def try_once() -> None:
            found = await self._load(specs_id)
            await self._core.database.write(qos_queries.delete, found, force, self._core.now())

        await retry_or_conflict(f"QoS specs {specs_id}", try_once)

    async def associations(self, request: Request, specs_id: str) -> dict[str, Any]:
        """List the volume types that are associated with QoS specs."""
        await self._load(specs_id)
        found = await self._core.database.read(qos_queries.associated, specs_id)
        shown = [{"association_type": "volume_type", "name": name, "id": id} for id, name in found.items()]
        return {"qos_associations": shown}

    async def associate(self, request: Request, specs_id: str) -> None:
        """Associate a volume type with QoS specs."""
        await self._set(request, specs_id, associated=True)

    async def disassociate(self, request: Request, specs_id: str) -> None:
        """End the association of a volume type."""
        await self._set(request, specs_id, associated=False)

    async def disassociate_all(self, request: Request, specs_id: str) -> None:
        """End all associations."""
        await self._load(specs_id)
        await self._core.database.write(qos_queries.end_associations, specs_id, self._core.now())

    async def _set(self, request: Request, specs_id: str, *, associated: bool) -> None:
        type_id = last(request.raw_query, "vol_type_id")
        if not type_id:
            raise Invalid("Volume Type id must not be None: name it in vol_type_id.")

        async def try_once() -> None:
            await self._load(specs_id)
            found = await self._core.database.read(type_queries.existing, type_id)
            if associated and found.qos_specs_id not in (None, specs_id):
                raise Invalid(f"Type {type_id} is already associated with another QoS specs: {found.qos_specs_id}.")
            if not associated and found.qos_specs_id != specs_id:
                return
            values: VolumeTypeColumns = {"qos_specs_id": specs_id if associated else None}
            await self._core.database.write(type_queries.update, found, values, self._core.now())

        await retry_or_conflict(f"volume type {type_id}", try_once)

    async def _load(self, specs_id: str) -> QosSpecs:
        found = await self._core.database.read(qos_queries.get, specs_id)
        if found is None:
            raise NotFound(f"No such QoS spec {specs_id[:64]}.")
        return found

    async def _change(self, specs_id: str, change: Callable[[QosSpecs], QosSpecsColumns]) -> None:
        async def try_once() -> None:
            found = await self._load(specs_id)
            await self._core.database.write(qos_queries.update, found, change(found), self._core.now())

        await retry_or_conflict(f"QoS specs {specs_id}", try_once)


def _view(found: QosSpecs) -> dict[str, Any]:
    return {"id": found.id, "name": found.name, "consumer": found.consumer, "specs": found.specs}


def _consumer(value: str) -> str:
    if value not in CONSUMERS:
        raise Invalid(f"Valid consumer of QoS specs are: {', '.join(CONSUMERS)}, not '{value[:64]}'.")
    return value
