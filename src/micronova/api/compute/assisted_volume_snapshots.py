"""Snapshots of attached volumes that a host makes for a block storage service.

Only such a service asks for them. Compute uses none, so no server has a volume of which a host could make a snapshot;
a volume that no server has is a mistake of the request, as in Nova.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from micronova.api.inputs import Body, Query
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.errors import Invalid

Text = Annotated[str, Meta(min_length=1)]


class CreateInfo(Body):
    """What the host needs to know."""

    snapshot_id: Text
    type: Literal["qcow2"]
    new_file: Text
    id: Text | UnsetType = UNSET


class NewSnapshot(Body):
    """The snapshot to make."""

    volume_id: Text
    create_info: CreateInfo


class Create(Body):
    """The body of a create."""

    snapshot: NewSnapshot


class DeleteQuery(Query):
    """What the host needs to know, as JSON."""

    delete_info: str | UnsetType = UNSET


def _not_attached(volume: str) -> Invalid:
    return Invalid(f"No volume Block Device Mapping with id {volume[:64]}.")


async def create(request: Request) -> None:
    """Raise Invalid: no server has the volume."""
    raise _not_attached(request.body.snapshot.volume_id)


async def delete(request: Request, id: str) -> None:
    """Raise Invalid: the query does not say of which volume, or no server has it."""
    given = request.query.delete_info
    try:
        info: Any = None if isinstance(given, UnsetType) else msgspec.json.decode(given)
    except (msgspec.DecodeError, RecursionError):
        info = None
    volume = info.get("volume_id") if isinstance(info, dict) else None
    if not isinstance(volume, str):
        raise Invalid("Invalid input for query parameter delete_info: it must be a JSON object with a volume_id.")
    raise _not_attached(volume)


def routes() -> list[Route]:
    """Declare the routes."""
    path, rule = "/os-assisted-volume-snapshots", "os_compute_api:os-assisted-volume-snapshots"
    return [
        Route(method="POST", path=path, handler=create, policy=f"{rule}:create", body=Create),
        Route(
            method="DELETE",
            path=f"{path}/{{id}}",
            handler=delete,
            policy=f"{rule}:delete",
            query=DeleteQuery,
            strict_query=since(75),
            status=204,
        ),
    ]
