"""The interfaces of servers: list, show, attach, detach."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from micronova.api import inputs
from micronova.api.compute.server_inputs import Id, Tag, given, ip_address
from micronova.api.compute.server_lookup import authorized_server
from micronova.api.inputs import STRICT
from micronova.api.view import Field, View
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.http.versions import since
from micronova.objects.errors import Invalid
from micronova.objects.network import VIF, NetworkRequest
from micronova.servers.interfaces import Interfaces

EXTERNAL = "network:attach_external_network"


class FixedIP(msgspec.Struct, forbid_unknown_fields=True):
    """A requested address."""

    ip_address: Annotated[str, Meta(max_length=64)]


class Attachment(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The interface to attach; without a network or a port, the project's only network is used."""

    net_id: Id | UnsetType = UNSET
    port_id: Id | UnsetType = UNSET
    fixed_ips: Annotated[list[FixedIP], Meta(min_length=1, max_length=1)] | UnsetType = UNSET
    tag: Tag | UnsetType = UNSET

    versions = {"tag": since(49)}


class AttachBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of an attachment."""

    attachment: Attachment = msgspec.field(name="interfaceAttachment", default_factory=Attachment)


_SHOWN = View(
    Field("net_id", "network_id", type=str),
    Field("port_id", "port_id", type=str),
    Field("mac_addr", "mac_address", type=str),
    Field("port_state", "status", type=str | None),
    Field(
        "fixed_ips",
        lambda vif, _: [{"subnet_id": fixed.subnet_id, "ip_address": fixed.address} for fixed in vif.fixed_ips],
        type=[{"subnet_id": str | None, "ip_address": str}],
    ),
    Field("tag", "tag", since(70), type=str | None),
)


class InterfaceHandlers:
    """The handlers."""

    def __init__(self, database: Database, interfaces: Interfaces) -> None:
        self._database = database
        self._interfaces = interfaces

    async def index(self, request: Request, id: str) -> dict[str, Any]:
        """List a server's interfaces."""
        row = await authorized_server(self._database, request, id)
        return {"interfaceAttachments": [_shown(request, vif) for vif in await self._interfaces.listed(row)]}

    async def show(self, request: Request, id: str, port_id: str) -> dict[str, Any]:
        """Show one of a server's interfaces."""
        row = await authorized_server(self._database, request, id)
        return {"interfaceAttachment": _shown(request, await self._interfaces.show(row, port_id))}

    async def create(self, request: Request, id: str) -> dict[str, Any]:
        """Attach an interface to a server."""
        row = await authorized_server(self._database, request, id)
        vif = await self._interfaces.attach(
            request.context,
            row,
            _wanted(request.body.attachment),
            may_attach_external=request.allows({"project_id": row["project_id"]}, EXTERNAL),
        )
        return {"interfaceAttachment": _shown(request, vif)}

    async def delete(self, request: Request, id: str, port_id: str) -> None:
        """Detach an interface from a server."""
        row = await authorized_server(self._database, request, id)
        await self._interfaces.detach(request.context, row, port_id)


def _wanted(asked: Attachment) -> NetworkRequest | None:
    network, port, tag = given(asked.net_id), given(asked.port_id), given(asked.tag)
    address = None if isinstance(asked.fixed_ips, UnsetType) else asked.fixed_ips[0].ip_address
    if network is not None and port is not None:
        raise Invalid("Must not input both network_id and port_id")
    if address is not None:
        if network is None:
            raise Invalid("Must input network_id when request IP address")
        address = str(ip_address("ip_address", address))
    if network is None and port is None:
        if tag is not None:
            raise Invalid("Invalid input for field/attribute tag: it needs a net_id or a port_id beside it.")
        return None
    return NetworkRequest(network_id=network, port_id=port, fixed_ip=address, tag=tag)


def _shown(request: Request, vif: VIF) -> dict[str, Any]:
    return _SHOWN.at(request.minor)(vif)


def routes(database: Database, interfaces: Interfaces) -> list[Route]:
    """Return the routes."""
    handlers = InterfaceHandlers(database, interfaces)
    rule, path = "os_compute_api:os-attach-interfaces", "/servers/{id}/os-interface"
    return [
        Route(
            method="GET",
            path=path,
            handler=handlers.index,
            policy=f"{rule}:list",
            checks_policy=True,
            answer={"interfaceAttachments": [_SHOWN]},
            query=inputs.NoQuery,
            strict_query=STRICT,
        ),
        Route(
            method="GET",
            path=f"{path}/{{port_id}}",
            handler=handlers.show,
            policy=f"{rule}:show",
            checks_policy=True,
            answer={"interfaceAttachment": _SHOWN},
            query=inputs.NoQuery,
            strict_query=STRICT,
        ),
        Route(
            method="POST",
            path=path,
            handler=handlers.create,
            policy=f"{rule}:create",
            checks_policy=True,
            answer={"interfaceAttachment": _SHOWN},
            body=AttachBody,
            errors=(500, 501),  # 500: the host could not attach it, as in Nova
        ),
        Route(
            method="DELETE",
            path=f"{path}/{{port_id}}",
            handler=handlers.delete,
            policy=f"{rule}:delete",
            checks_policy=True,
            status=202,
        ),
    ]
