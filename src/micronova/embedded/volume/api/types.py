"""Volume types: their extra specs, the projects that may use them, and the default types of projects."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType, field

from micronova.embedded.common.query import last
from micronova.embedded.volume.api import listing
from micronova.embedded.volume.api.action_routes import action_route
from micronova.embedded.volume.api.listing import QUERY_RULES, Links
from micronova.embedded.volume.api.request_bodies import MOST_ITEMS, Body, Flag, Text, identifier, required_name, truth
from micronova.embedded.volume.core import Core, retry_or_conflict
from micronova.embedded.volume.model import VolumeType, VolumeTypeColumns
from micronova.embedded.volume.store import type_queries
from micronova.embedded.volume.tables import volume_types
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.errors import Invalid, NotFound

SpecKey = Annotated[str, Meta(title="1 to 255 letters, digits and - _ : .", pattern=r"^[a-zA-Z0-9\-_:.]{1,255}\Z")]
Specs = Annotated[dict[SpecKey, Text | None], Meta(max_length=MOST_ITEMS)]
VISIBLE = ("multiattach", "RESKEY:availability_zones", "replication_enabled")
"""The extra specs that every user sees: they say what a user can do with a volume."""
_PUBLIC = "os-volume-type-access:is_public"
_EXTRA_SPECS = "volume_extension:types_extra_specs:"
_ACCESS = "volume_extension:volume_type_access:"


class NewType(Body):
    """The type to create."""

    name: Annotated[str, Meta(min_length=1, max_length=255)]
    description: Text | None = None
    extra_specs: Specs | None = None
    is_public: Flag = field(default=True, name="os-volume-type-access:is_public")


class NewTypeBody(Body):
    """The body of a create."""

    volume_type: NewType


class TypeChanges(Body):
    """The fields of a type that can change."""

    name: Annotated[str, Meta(min_length=1, max_length=255)] | None | UnsetType = UNSET
    description: Text | None | UnsetType = UNSET
    is_public: Flag | UnsetType = UNSET
    access_is_public: Flag | UnsetType = field(default=UNSET, name="os-volume-type-access:is_public")


class TypeChangesBody(Body):
    """The body of an update."""

    volume_type: TypeChanges


class SpecsBody(Body):
    """The body that adds extra specs."""

    extra_specs: Specs


class Project(Body):
    """The arguments of addProjectAccess and removeProjectAccess."""

    project: Annotated[str, Meta(min_length=1, max_length=255)]


class NewDefault(Body):
    """The default type of a project."""

    volume_type: Annotated[str, Meta(min_length=1, max_length=255)]


class NewDefaultBody(Body):
    """The body that sets a default type."""

    default_type: NewDefault


class TypeHandlers:
    """The handlers of volume types."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_, one = "/types", "/types/{type_id}"
        specs, spec = f"{one}/extra_specs", f"{one}/extra_specs/{{key}}"
        manage = "volume_extension:type_"
        act = partial(action_route, of="type", checks_policy=False)
        default, since_62 = "/default-types/{project}", since(62)
        return [
            Route(method="GET", path=all_, handler=self.index, policy=f"{manage}get_all"),
            Route(method="POST", path=all_, handler=self.create, policy=f"{manage}create", body=NewTypeBody),
            Route(method="GET", path=one, handler=self.show, policy=f"{manage}get"),
            Route(method="PUT", path=one, handler=self.update, policy=f"{manage}update", body=TypeChangesBody),
            Route(method="DELETE", path=one, handler=self.delete, policy=f"{manage}delete", status=202),
            Route(method="GET", path=specs, handler=self.list_specs, policy=f"{_EXTRA_SPECS}index"),
            Route(method="POST", path=specs, handler=self.add_specs, policy=f"{_EXTRA_SPECS}create", body=SpecsBody),
            Route(method="GET", path=spec, handler=self.show_spec, policy=f"{_EXTRA_SPECS}show"),
            Route(method="PUT", path=spec, handler=self.set_spec, policy=f"{_EXTRA_SPECS}update", body=Specs),
            Route(method="DELETE", path=spec, handler=self.delete_spec, policy=f"{_EXTRA_SPECS}delete", status=202),
            Route(
                method="GET",
                path=f"{one}/os-volume-type-access",
                handler=self.list_access,
                policy=f"{_ACCESS}get_all_for_type",
            ),
            act("addProjectAccess", self.add_access, f"{_ACCESS}addProjectAccess", Project),
            act("removeProjectAccess", self.remove_access, f"{_ACCESS}removeProjectAccess", Project),
            Route(
                method="GET",
                path="/default-types",
                handler=self.list_defaults,
                policy="volume_extension:default_get_all",
                versions=since_62,
            ),
            Route(
                method="GET",
                path=default,
                handler=self.show_default,
                policy="volume_extension:default_get",
                versions=since_62,
            ),
            Route(
                method="PUT",
                path=default,
                handler=self.set_default,
                policy="volume_extension:default_set_or_update",
                versions=since_62,
                body=NewDefaultBody,
            ),
            Route(
                method="DELETE",
                path=default,
                handler=self.unset_default,
                policy="volume_extension:default_unset",
                versions=since_62,
                status=204,
            ),
        ]

    # --- types -----------------------------------------------------------------------------------------------

    async def index(self, request: Request) -> dict[str, Any]:
        """List the types that the caller may use; administrators choose by `is_public`."""
        query, context = request.raw_query, request.context
        page = listing.read_page(query, type_queries.SORTABLE, self._core.settings.max_limit)
        conditions = []
        public = last(query, "is_public")
        if not context.is_admin:
            conditions.append(type_queries.visible_to(context.project_id))
        elif public is None:
            conditions.append(volume_types.c.is_public)
        elif public.lower() != "none":
            conditions.append(volume_types.c.is_public == QUERY_RULES.boolean("is_public", public))
        if "name" in query:
            conditions.append(volume_types.c.name.in_(query["name"]))
        found, more, _ = await self._core.database.read(type_queries.list_types, page, conditions)
        following = found[-1].id if found and more else None
        wanted = last(query, "extra_specs") if request.minor >= 52 else None
        if wanted is not None:
            items = listing.dictionary("extra_specs", wanted).items()
            found = [each for each in found if all(_seen(request, each).get(key) == value for key, value in items)]
        body: dict[str, Any] = {"volume_types": [_view(request, each) for each in found]}
        links = Links(request).next("volume_type", "types", following)
        return body | links

    async def show(self, request: Request, type_id: str) -> dict[str, Any]:
        """Show a type, or with the id `default` that of the caller's new volumes."""
        if type_id == "default":
            name, project = self._core.settings.default_volume_type, request.context.project_id
            found = await self._core.database.read(type_queries.default_of, project, name)
            if found is None:
                raise NotFound("There is no default volume type.")
            return {"volume_type": _view(request, found)}
        return {"volume_type": _view(request, await self._load(request, type_id))}

    async def create(self, request: Request) -> dict[str, Any]:
        """Create a type."""
        asked: NewType = request.body.volume_type
        made = VolumeType(
            id=self._core.new_id(),
            name=required_name(asked.name),
            description=asked.description,
            is_public=truth(asked.is_public),
            extra_specs={key: value or "" for key, value in (asked.extra_specs or {}).items()},
            qos_specs_id=None,
            created_at=self._core.now(),
            updated_at=None,
            revision=1,
        )
        await self._core.database.write(type_queries.insert, made)
        return {"volume_type": {**_plain(request, made), _PUBLIC: made.is_public}}

    async def update(self, request: Request, type_id: str) -> dict[str, Any]:
        """Change name, description, and whether all projects may use the type."""
        given: TypeChanges = request.body.volume_type
        values: VolumeTypeColumns = {}
        if isinstance(given.name, str):
            values["name"] = required_name(given.name)
        if not isinstance(given.description, UnsetType):
            values["description"] = given.description
        for public in (given.access_is_public, given.is_public):  # openstacksdk sends the name that a create has
            if not isinstance(public, UnsetType):
                values["is_public"] = truth(public)
        if not values:
            raise Invalid("Specify volume type name, description, is_public or a combination thereof.")
        return {"volume_type": _plain(request, await self._change(request, type_id, lambda _: values))}

    async def delete(self, request: Request, type_id: str) -> None:
        """Delete a type that nothing has."""

        async def try_once() -> None:
            found = await self._load(request, type_id)
            if found.name == self._core.settings.default_volume_type:
                raise Invalid(f"Volume Type {found.name} deletion is not allowed: it is the default of the cloud.")
            await self._core.database.write(type_queries.delete, found)

        await retry_or_conflict(f"volume type {type_id}", try_once)

    async def _load(self, request: Request, type_id: str) -> VolumeType:
        context = request.context
        found = await self._core.database.read(type_queries.usable, type_id, context.project_id, context.is_admin)
        if found is None or found.id != type_id:
            raise NotFound(f"Volume type {type_id[:64]} could not be found.")
        return found

    async def _change(
        self, request: Request, type_id: str, change: Callable[[VolumeType], VolumeTypeColumns]
    ) -> VolumeType:
        async def try_once() -> VolumeType:
            found = await self._load(request, type_id)
            await self._core.database.write(type_queries.update, found, change(found), self._core.now())
            return await self._load(request, type_id)

        return await retry_or_conflict(f"volume type {type_id}", try_once)

    # --- extra specs -----------------------------------------------------------------------------------------

    async def list_specs(self, request: Request, type_id: str) -> dict[str, Any]:
        """Show the extra specs that the caller may see."""
        return {"extra_specs": _seen(request, await self._load(request, type_id))}

    async def show_spec(self, request: Request, type_id: str, key: str) -> dict[str, Any]:
        """Show one extra spec."""
        seen = _seen(request, await self._load(request, type_id))
        if key not in seen:
            raise _no_spec(type_id, key)
        return {key: seen[key]}

    async def add_specs(self, request: Request, type_id: str) -> dict[str, Any]:
        """Add extra specs, and replace those of the same names."""
        given = {key: value or "" for key, value in request.body.extra_specs.items()}
        await self._change(request, type_id, lambda old: {"extra_specs": _limited({**old.extra_specs, **given})})
        return {"extra_specs": given}

    async def set_spec(self, request: Request, type_id: str, key: str) -> dict[str, Any]:
        """Set one extra spec."""
        given = {name: value or "" for name, value in request.body.items()}
        if list(given) != [key]:
            raise Invalid(f"The body must have one extra spec, with the name in the path: '{key[:64]}'.")
        await self._change(request, type_id, lambda old: {"extra_specs": _limited({**old.extra_specs, **given})})
        return given

    async def delete_spec(self, request: Request, type_id: str, key: str) -> None:
        """Remove one extra spec."""

        def change(old: VolumeType) -> VolumeTypeColumns:
            if key not in old.extra_specs:
                raise _no_spec(type_id, key)
            return {"extra_specs": {name: value for name, value in old.extra_specs.items() if name != key}}

        await self._change(request, type_id, change)

    # --- access ----------------------------------------------------------------------------------------------

    async def list_access(self, request: Request, type_id: str) -> dict[str, Any]:
        """List the projects that may use a type that is not public."""
        found = await self._load(request, type_id)
        if found.is_public:
            raise NotFound(f"Access list not available for public volume types: {found.name} is public.")
        projects = await self._core.database.read(type_queries.projects, type_id)
        return {"volume_type_access": [{"volume_type_id": type_id, "project_id": each} for each in projects]}

    async def add_access(self, request: Request, type_id: str) -> None:
        """Let a project use a type."""
        await self._check_not_public(request, type_id)
        await self._core.database.write(type_queries.add_project, type_id, request.body.arguments.project)

    async def remove_access(self, request: Request, type_id: str) -> None:
        """Take a type from a project."""
        await self._check_not_public(request, type_id)
        await self._core.database.write(type_queries.remove_project, type_id, request.body.arguments.project)

    async def _check_not_public(self, request: Request, type_id: str) -> None:
        found = await self._load(request, type_id)
        if found.is_public:
            raise Invalid(f"Type access modification is not applicable to public volume type {found.name}.")

    # --- default types ---------------------------------------------------------------------------------------

    async def list_defaults(self, request: Request) -> dict[str, Any]:
        """List the default types of projects."""
        found = await self._core.database.read(type_queries.defaults)
        return {"default_types": [{"project_id": project, "volume_type_id": id} for project, id in found.items()]}

    async def show_default(self, request: Request, project: str) -> dict[str, Any]:
        """Show the default type of a project."""
        found = await self._core.database.read(type_queries.defaults)
        if project not in found:
            raise NotFound(f"Default type for project {project[:64]} not found.")
        return {"default_type": {"project_id": project, "volume_type_id": found[project]}}

    async def set_default(self, request: Request, project: str) -> dict[str, Any]:
        """Set the default type of a project."""
        named = request.body.default_type.volume_type
        found = await self._core.database.read(type_queries.usable, named, project, False)
        if found is None:
            raise NotFound(f"Volume type {named[:64]} could not be found, or project {project[:64]} may not use it.")
        await self._core.database.write(type_queries.set_default, identifier(project), found.id)
        return {"default_type": {"project_id": project, "volume_type_id": found.id}}

    async def unset_default(self, request: Request, project: str) -> None:
        """Let a project have the default type of the cloud."""
        await self._core.database.write(type_queries.unset_default, project)


def _view(request: Request, type_: VolumeType) -> dict[str, Any]:
    shown = {**_plain(request, type_), _PUBLIC: type_.is_public}
    if request.allows(rule="volume_extension:access_types_qos_specs_id"):
        shown["qos_specs_id"] = type_.qos_specs_id
    return shown


def _plain(request: Request, type_: VolumeType) -> dict[str, Any]:
    """Return the fields that the answer to a change has."""
    shown: dict[str, Any] = {
        "id": type_.id,
        "name": type_.name,
        "is_public": type_.is_public,
        "description": type_.description,
    }
    if request.allows(rule="volume_extension:access_types_extra_specs"):
        shown["extra_specs"] = _seen(request, type_)
    return shown


def _seen(request: Request, type_: VolumeType) -> dict[str, str]:
    """Return the extra specs that the caller may see."""
    if request.allows(rule=f"{_EXTRA_SPECS}read_sensitive"):
        return type_.extra_specs
    return {name: value for name, value in type_.extra_specs.items() if name in VISIBLE}


def _limited(specs: dict[str, str]) -> dict[str, str]:
    if len(specs) > MOST_ITEMS:
        raise Invalid(f"A volume type may have at most {MOST_ITEMS} extra specs.")
    return specs


def _no_spec(type_id: str, key: str) -> NotFound:
    return NotFound(f"Volume Type {type_id} has no extra specs with key {key[:64]}.")
