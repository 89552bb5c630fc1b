"""Bare metal nodes (until 2.35): there is no bare metal service, and changes were never possible here."""

from functools import partial

from micronova.api.inputs import NoQuery
from micronova.http.request import Request
from micronova.http.service import AUTHENTICATED, Route
from micronova.http.versions import until
from micronova.objects.errors import Invalid, NotSupported


async def read(request: Request, id: str = "") -> None:
    """Raise NotSupported."""
    raise NotSupported("There is no bare metal service.")


async def change(request: Request, id: str = "") -> None:
    """Raise Invalid: only the bare metal service changes its nodes, with and without one."""
    raise Invalid("Command not supported: the bare metal service itself creates, changes and deletes its nodes.")


def routes() -> list[Route]:
    """Declare the routes."""
    path, rule = "/os-baremetal-nodes", "os_compute_api:os-baremetal-nodes"
    shown = partial(Route, method="GET", handler=read, query=NoQuery, versions=until(35), errors=(501,))
    changed = partial(Route, handler=change, policy=AUTHENTICATED, versions=until(35))
    return [
        shown(path=path, policy=f"{rule}:list"),
        shown(path=f"{path}/{{id}}", policy=f"{rule}:show"),
        changed(method="POST", path=path),
        changed(method="DELETE", path=f"{path}/{{id}}"),
        changed(method="POST", path=f"{path}/{{id}}/action"),
    ]
