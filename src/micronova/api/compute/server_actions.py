"""Actions on servers: POST /servers/{id}/action with the action's name as the body's only key."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from micronova.api import inputs
from micronova.api.compute.server_lookup import authorized_server
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Handler, Route
from micronova.http.versions import Range, since, until
from micronova.objects import states
from micronova.objects.errors import Conflict, Invalid
from micronova.servers.actions import ServerActions, check_lock, lock_holder
from micronova.servers.guest_queries import GuestQueries
from micronova.servers.interfaces import Interfaces
from micronova.servers.security_groups import ServerSecurityGroups


def _bare(action: str) -> type[msgspec.Struct]:
    """Return the body of an action without parameters; the value beside the action's name is ignored."""
    return msgspec.defstruct(
        f"{action}Body", [("value", Any, field(name=action, default=None))], forbid_unknown_fields=True
    )


class Reboot(msgspec.Struct, forbid_unknown_fields=True):
    """How to reboot."""

    type: Literal["SOFT", "HARD", "Soft", "Hard", "soft", "hard"]


class RebootBody(msgspec.Struct, forbid_unknown_fields=True):
    """Reboot."""

    reboot: Reboot


class ConsoleOutputPart(msgspec.Struct, forbid_unknown_fields=True):
    """How much of the console log."""

    length: int | str | None = None


class ConsoleOutputBody(msgspec.Struct, forbid_unknown_fields=True):
    """Console log."""

    value: ConsoleOutputPart = field(name="os-getConsoleOutput")


class Lock(msgspec.Struct, forbid_unknown_fields=True):
    """Why a server is locked."""

    locked_reason: Annotated[str, Meta(min_length=1, max_length=255)] | UnsetType = UNSET


class LockBody(msgspec.Struct, forbid_unknown_fields=True):
    """Lock, perhaps with a reason."""

    lock: Lock | None


class ResetState(msgspec.Struct, forbid_unknown_fields=True):
    """The state to set."""

    state: Literal["active", "error"]


class ResetStateBody(msgspec.Struct, forbid_unknown_fields=True):
    """Set a server's state by hand."""

    value: ResetState = field(name="os-resetState")


class SecurityGroup(msgspec.Struct, forbid_unknown_fields=True):
    """A security group by its name or id."""

    name: Annotated[str, Meta(min_length=1, max_length=255)]


class AddSecurityGroupBody(msgspec.Struct, forbid_unknown_fields=True):
    """Add a security group."""

    value: SecurityGroup = field(name="addSecurityGroup")


class RemoveSecurityGroupBody(msgspec.Struct, forbid_unknown_fields=True):
    """Remove a security group."""

    value: SecurityGroup = field(name="removeSecurityGroup")


@dataclass(frozen=True, kw_only=True)
class _Action:
    """One action: its name in the body, its handler and its policy."""

    name: str
    handler: Handler
    policy: str
    body: Any
    status: int = 202
    versions: Range = Range()


class ActionHandlers:
    """The handlers."""

    def __init__(
        self,
        database: Database,
        actions: ServerActions,
        interfaces: Interfaces,
        security_groups: ServerSecurityGroups,
        guests: GuestQueries,
    ) -> None:
        self._database = database
        self._actions = actions
        self._interfaces = interfaces
        self._security_groups = security_groups
        self._guests = guests

    def power_handler(self, kind: str) -> Handler:
        """Return the handler of a power action without parameters."""

        async def handle(request: Request, id: str) -> None:
            row = await authorized_server(self._database, request, id)
            await self._actions.power(request.context, row, kind, kind)

        return handle

    async def force_delete(self, request: Request, id: str) -> None:
        """Delete a server at once, even where deletion is deferred."""
        await self._actions.delete(request.context, await authorized_server(self._database, request, id))

    async def reboot(self, request: Request, id: str) -> None:
        """Reboot a server."""
        row = await authorized_server(self._database, request, id)
        kind = request.body.reboot.type.upper()
        action = "reboot_hard" if kind == "HARD" else "reboot"
        await self._actions.power(request.context, row, "reboot", action, {"type": kind})

    async def lock(self, request: Request, id: str) -> None:
        """Lock a server against changes."""
        row = await authorized_server(self._database, request, id)
        asked = request.body.lock if isinstance(request.body, LockBody) else None
        reason = None if asked is None or asked.locked_reason is UNSET else asked.locked_reason
        await self._actions.lock(request.context, row, inputs.printable(reason, "locked_reason"))

    async def unlock(self, request: Request, id: str) -> None:
        """Unlock a server; a lock of another user needs the policy to override it."""
        row = await authorized_server(self._database, request, id)
        if row["locked_by"] not in (None, lock_holder(request.context, row)):
            target = {"project_id": row["project_id"], "user_id": row["user_id"]}
            request.authorize(target, "os_compute_api:os-lock-server:unlock:unlock_override")
        await self._actions.unlock(request.context, row)

    async def reset_state(self, request: Request, id: str) -> None:
        """Set a server's state by hand."""
        row = await authorized_server(self._database, request, id)
        wanted = states.ACTIVE if request.body.value.state == "active" else states.ERROR
        await self._actions.reset_state(row, wanted)

    async def inject_network_info(self, request: Request, id: str) -> None:
        """Refresh a server's interfaces from the network service."""
        row = await authorized_server(self._database, request, id)
        check_lock(request.context, row)
        if row["host"] is None:
            raise Conflict(f"Cannot 'injectNetworkInfo' instance {row['uuid']} while it has no host")
        await self._interfaces.refresh(row["uuid"])

    async def add_security_group(self, request: Request, id: str) -> None:
        """Add a security group to a server's ports."""
        row = await authorized_server(self._database, request, id)
        await self._security_groups.add(request.context, row, request.body.value.name)

    async def remove_security_group(self, request: Request, id: str) -> None:
        """Remove a security group from a server's ports."""
        row = await authorized_server(self._database, request, id)
        await self._security_groups.remove(request.context, row, request.body.value.name)

    async def console_output(self, request: Request, id: str) -> dict[str, str]:
        """Read the end of a server's console log."""
        row = await authorized_server(self._database, request, id)
        asked = request.body.value.length
        length = None if asked is None else _length(asked)
        return {"output": await self._guests.console_output(request.context, row, length)}


def _length(value: int | str) -> int | None:
    """Read the number of lines; -1 means all."""
    try:
        number = int(value)
    except ValueError:
        raise Invalid("Invalid input for field/attribute length: it is a number of lines.") from None
    if number < -1:
        raise Invalid("Invalid input for field/attribute length: it must be -1 (all) or more.")
    return None if number == -1 else inputs.whole(number, "length")


def routes(
    database: Database,
    actions: ServerActions,
    interfaces: Interfaces,
    security_groups: ServerSecurityGroups,
    guests: GuestQueries,
) -> list[Route]:
    """Return the routes of the actions, for /servers and its old name /os-volumes_boot."""
    handlers = ActionHandlers(database, actions, interfaces, security_groups, guests)

    def plain(name: str, kind: str, policy: str) -> _Action:
        return _Action(name=name, handler=handlers.power_handler(kind), policy=policy, body=_bare(name))

    lock = _Action(name="lock", handler=handlers.lock, policy="os_compute_api:os-lock-server:lock", body=LockBody)
    table = [
        plain("os-start", "start", "os_compute_api:servers:start"),
        plain("os-stop", "stop", "os_compute_api:servers:stop"),
        plain("pause", "pause", "os_compute_api:os-pause-server:pause"),
        plain("unpause", "unpause", "os_compute_api:os-pause-server:unpause"),
        plain("suspend", "suspend", "os_compute_api:os-suspend-server:suspend"),
        plain("resume", "resume", "os_compute_api:os-suspend-server:resume"),
        _Action(
            name="forceDelete",
            handler=handlers.force_delete,
            policy="os_compute_api:os-deferred-delete:force",
            body=_bare("forceDelete"),
        ),
        _Action(name="reboot", handler=handlers.reboot, policy="os_compute_api:servers:reboot", body=RebootBody),
        replace(lock, body=_bare("lock"), versions=until(72)),
        replace(lock, versions=since(73)),
        _Action(
            name="unlock",
            handler=handlers.unlock,
            policy="os_compute_api:os-lock-server:unlock",
            body=_bare("unlock"),
        ),
        _Action(
            name="addSecurityGroup",
            handler=handlers.add_security_group,
            policy="os_compute_api:os-security-groups:add",
            body=AddSecurityGroupBody,
        ),
        _Action(
            name="removeSecurityGroup",
            handler=handlers.remove_security_group,
            policy="os_compute_api:os-security-groups:remove",
            body=RemoveSecurityGroupBody,
        ),
        _Action(
            name="os-resetState",
            handler=handlers.reset_state,
            policy="os_compute_api:os-admin-actions:reset_state",
            body=ResetStateBody,
        ),
        _Action(
            name="injectNetworkInfo",
            handler=handlers.inject_network_info,
            policy="os_compute_api:os-admin-actions:inject_network_info",
            body=_bare("injectNetworkInfo"),
        ),
        _Action(
            name="os-getConsoleOutput",
            handler=handlers.console_output,
            policy="os_compute_api:os-console-output",
            body=ConsoleOutputBody,
            status=200,
        ),
    ]
    return [
        Route(
            method="POST",
            path=f"{path}/{{id}}/action",
            action=action.name,
            handler=action.handler,
            policy=action.policy,
            status=action.status,
            body=action.body,
            checks_policy=True,
            versions=Range(action.versions.since, min(newest, action.versions.until)),
        )
        for path, newest in (("/servers", Range().until), ("/os-volumes_boot", 102))
        for action in table
    ]
