"""The network's part in the policy targets of ports and subnets, and the check that a caller may see a network."""

from collections.abc import Mapping
from typing import Any, TypeVar

from micronova.embedded.network.errors import not_found
from micronova.embedded.network.row_types import NetworkAccessRow, NetworkOfRow
from micronova.embedded.network.sharing import NOBODY, Access
from micronova.embedded.network.tables import networks
from micronova.http.request import Request

N = TypeVar("N", bound=NetworkAccessRow)


def visible_network(request: Request, id: str, rows: Mapping[str, N], access: Mapping[str, Access]) -> N:
    """Return the network with this id; raise NotFound if there is none, or if the caller may not see it."""
    row = rows.get(id)
    if row is not None:
        caller, shared = request.context.project_id, access.get(id, NOBODY)
        target = {
            "project_id": row.project_id,
            "shared": shared.is_shared(caller),
            "router:external": shared.is_external(caller),
        }
        if request.allows(target, "get_network"):
            return row
    raise not_found("network", id)


def parent_network(request: Request, row: NetworkAccessRow, access: Mapping[str, Access]) -> dict[str, Any]:
    """Return the part of the policy target of a new port or subnet that describes its network."""
    caller, shared = request.context.project_id, access.get(row.id, NOBODY)
    return {
        "network:project_id": row.project_id,
        "network:shared": shared.is_shared(caller),
        "network:router:external": shared.is_external(caller),
    }


def parent_network_of(row: NetworkOfRow) -> dict[str, Any]:
    """Return the part of the policy target of a port or subnet that describes its network, from its row.

    `collection.seen_by` says what is shared with the caller.
    """
    return {"network:project_id": row.network_project, "network:shared": False, "network:router:external": False}


NETWORK_LABELS = (
    networks.c.project_id.label("network_project"),
    networks.c.external.label("network_external"),
    networks.c.qos_policy_id.label("network_qos_policy"),
)
