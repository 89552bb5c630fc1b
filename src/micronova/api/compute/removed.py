"""Resources and actions that OpenStack removed: they answer 410 at every microversion."""

from typing import Any

from micronova.http.request import Request
from micronova.http.service import AUTHENTICATED, Route
from micronova.objects.errors import Gone

# Path -> methods. The first parameter is always {id}, because these paths share it with existing routes.
_REMOVED: dict[str, str] = {
    "/os-agents": "GET POST",
    "/os-agents/{id}": "PUT DELETE",
    "/os-cells": "GET POST",
    "/os-cells/capacities": "GET",
    "/os-cells/detail": "GET",
    "/os-cells/info": "GET",
    "/os-cells/sync_instances": "POST",
    "/os-cells/{id}": "GET PUT DELETE",
    "/os-cells/{id}/capacities": "GET",
    "/os-certificates": "POST",
    "/os-certificates/{id}": "GET",
    "/os-cloudpipe": "GET POST",
    "/os-cloudpipe/{id}": "PUT",
    "/os-fixed-ips/{id}": "GET",
    "/os-fixed-ips/{id}/action": "POST",
    "/os-floating-ip-dns": "GET",
    "/os-floating-ip-dns/{id}": "PUT DELETE",
    "/os-floating-ip-dns/{id}/entries/{entry}": "GET PUT DELETE",
    "/os-floating-ips-bulk": "GET POST",
    "/os-floating-ips-bulk/{id}": "GET PUT",
    "/os-fping": "GET",
    "/os-fping/{id}": "GET",
    "/os-networks": "POST",
    "/os-networks/add": "POST",
    "/os-networks/{id}": "DELETE",
    "/os-networks/{id}/action": "POST",
    "/os-security-group-default-rules": "GET POST",
    "/os-security-group-default-rules/{id}": "GET DELETE",
    "/os-tenant-networks": "POST",
    "/os-tenant-networks/{id}": "DELETE",
    "/servers/{id}/consoles": "GET POST",
    "/servers/{id}/consoles/{console}": "GET DELETE",
    "/servers/{id}/os-virtual-interfaces": "GET",
}
_REMOVED_ACTIONS = ("os-getRDPConsole", "resetNetwork")


async def gone(request: Request, **_: Any) -> None:
    """Raise Gone."""
    raise Gone("This resource is no longer available. No forwarding address is given.")


def routes() -> list[Route]:
    """Declare everything that was removed."""
    found = [
        Route(method=method, path=path, handler=gone, policy=AUTHENTICATED, status=410)
        for path, methods in _REMOVED.items()
        for method in methods.split()
    ]
    found += [
        Route(method="POST", path="/servers/{id}/action", action=action, handler=gone, policy=AUTHENTICATED, status=410)
        for action in _REMOVED_ACTIONS
    ]
    return found
