"""Server actions that have no module of their own: power, locks, rescue, security groups, os-resetState and others."""

import re
from dataclasses import replace
from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType, field

from micronova.api import inputs
from micronova.api.compute.action_routes import ActionRoute, action_routes, bare_body
from micronova.api.compute.server_inputs import Id, SecurityGroup, given
from micronova.api.compute.server_lookup import authorized_server, server_target
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.http.service import Handler, Route
from micronova.http.versions import since, until
from micronova.objects import states
from micronova.objects.errors import Conflict, Invalid, NotSupported, Unavailable
from micronova.servers.actions import ServerActions, check_lock, lock_holder
from micronova.servers.admin_password import AdminPasswords
from micronova.servers.guest_queries import GuestQueries
from micronova.servers.interfaces import Interfaces
from micronova.servers.rescue import ServerRescue
from micronova.servers.security_groups import ServerSecurityGroups

_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f]")
"""What Nova leaves out of console logs: control characters, but for tabs and line feeds."""


class Reboot(msgspec.Struct, forbid_unknown_fields=True):
    """How to reboot."""

    type: Literal["SOFT", "HARD", "Soft", "Hard", "soft", "hard"]


class RebootBody(msgspec.Struct, forbid_unknown_fields=True):
    """Reboot."""

    reboot: Reboot


class Rescue(msgspec.Struct, forbid_unknown_fields=True):
    """What to rescue a server with."""

    admin_password: str | UnsetType = field(name="adminPass", default=UNSET)
    rescue_image_ref: Id | UnsetType = UNSET


class RescueBody(msgspec.Struct, forbid_unknown_fields=True):
    """Rescue."""

    rescue: Rescue | None


class ChangePassword(msgspec.Struct, forbid_unknown_fields=True):
    """The new password."""

    admin_password: str = field(name="adminPass")


class ChangePasswordBody(msgspec.Struct, forbid_unknown_fields=True):
    """Change the administrator's password."""

    value: ChangePassword = field(name="changePassword")


class CrashDumpBody(msgspec.Struct, forbid_unknown_fields=True):
    """Trigger a crash dump."""

    trigger_crash_dump: None


class ConsoleOutputPart(msgspec.Struct, forbid_unknown_fields=True):
    """How much of the console log."""

    length: int | str | None = None


class ConsoleOutputBody(msgspec.Struct, forbid_unknown_fields=True):
    """Console log."""

    value: ConsoleOutputPart = field(name="os-getConsoleOutput")


class Lock(msgspec.Struct, forbid_unknown_fields=True):
    """Why a server is locked."""

    locked_reason: inputs.Text | UnsetType = UNSET


class LockBody(msgspec.Struct, forbid_unknown_fields=True):
    """Lock, perhaps with a reason."""

    lock: Lock | None


class ResetState(msgspec.Struct, forbid_unknown_fields=True):
    """The state to set."""

    state: Literal["active", "error"]


class ResetStateBody(msgspec.Struct, forbid_unknown_fields=True):
    """Set a server's state by hand."""

    value: ResetState = field(name="os-resetState")


class AddSecurityGroupBody(msgspec.Struct, forbid_unknown_fields=True):
    """Add a security group."""

    value: SecurityGroup = field(name="addSecurityGroup")


class RemoveSecurityGroupBody(msgspec.Struct, forbid_unknown_fields=True):
    """Remove a security group."""

    value: SecurityGroup = field(name="removeSecurityGroup")


class ActionHandlers:
    """The handlers of the actions."""

    def __init__(
        self,
        database: Database,
        actions: ServerActions,
        interfaces: Interfaces,
        security_groups: ServerSecurityGroups,
        guests: GuestQueries,
        rescue: ServerRescue,
        passwords: AdminPasswords,
        shows_passwords: bool,
    ) -> None:
        self._rescue = rescue
        self._passwords = passwords
        self._shows_passwords = shows_passwords
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
        await self._actions.delete(request.context, await authorized_server(self._database, request, id), force=True)

    async def restore(self, request: Request, id: str) -> None:
        """Restore a server that is soft-deleted."""
        await self._actions.restore(request.context, await authorized_server(self._database, request, id))

    async def reboot(self, request: Request, id: str) -> None:
        """Reboot a server."""
        row = await authorized_server(self._database, request, id)
        kind = request.body.reboot.type.upper()
        action = "reboot_hard" if kind == "HARD" else "reboot"
        await self._actions.power(request.context, row, "reboot", action, {"type": kind})

    async def rescue(self, request: Request, id: str) -> dict[str, str]:
        """Boot a server from another image, so that its disk can be repaired."""
        row = await authorized_server(self._database, request, id)
        wanted = request.body.rescue or Rescue()
        password = await self._rescue.rescue(
            request.context,
            row,
            image_id=given(wanted.rescue_image_ref),
            password=given(wanted.admin_password),
            allows_volumes=request.minor >= 87,
        )
        return {"adminPass": password} if self._shows_passwords else {}

    async def change_password(self, request: Request, id: str) -> None:
        """Change the password of a server's administrator; answer when the guest has taken it."""
        row = await authorized_server(self._database, request, id)
        await self._passwords.change(request.context, row, request.body.value.admin_password)

    async def trigger_crash_dump(self, request: Request, id: str) -> None:
        """Make a server's operating system dump its memory."""
        row = await authorized_server(self._database, request, id)
        kind = "trigger_crash_dump"
        try:
            await self._actions.power(request.context, row, kind, kind)
        except NotSupported as error:
            raise Invalid(error.message) from None  # of this action, clients expect no 501

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
            request.authorize(server_target(row), "os_compute_api:os-lock-server:unlock:unlock_override")
        await self._actions.unlock(request.context, row)

    async def reset_state(self, request: Request, id: str) -> None:
        """Set a server's state by hand."""
        row = await authorized_server(self._database, request, id)
        wanted = states.ACTIVE if request.body.value.state == "active" else states.ERROR
        await self._actions.reset_state(request.context, row, wanted)

    async def inject_network_info(self, request: Request, id: str) -> None:
        """Refresh a server's interfaces from the network service."""
        row = await authorized_server(self._database, request, id)
        check_lock(request.context, row)
        if row["host"] is None:
            raise Conflict(f"Cannot 'injectNetworkInfo' instance {row['uuid']} while it has no host")
        if not await self._interfaces.refresh(row["uuid"]):
            raise Unavailable(f"Instance {row['uuid']} changed while its interfaces were read. Try again later.")

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
        return {"output": _CONTROL.sub("", await self._guests.console_output(request.context, row, length))}


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
    rescue: ServerRescue,
    passwords: AdminPasswords,
    *,
    shows_passwords: bool,
) -> list[Route]:
    """Return the routes of the actions."""
    handlers = ActionHandlers(
        database, actions, interfaces, security_groups, guests, rescue, passwords, shows_passwords
    )

    def plain(name: str, kind: str, policy: str) -> ActionRoute:
        return ActionRoute(name=name, handler=handlers.power_handler(kind), policy=policy, body=bare_body(name))

    lock = ActionRoute(name="lock", handler=handlers.lock, policy="os_compute_api:os-lock-server:lock", body=LockBody)
    table = [
        plain("os-start", "start", "os_compute_api:servers:start"),
        plain("os-stop", "stop", "os_compute_api:servers:stop"),
        plain("pause", "pause", "os_compute_api:os-pause-server:pause"),
        plain("unpause", "unpause", "os_compute_api:os-pause-server:unpause"),
        plain("suspend", "suspend", "os_compute_api:os-suspend-server:suspend"),
        plain("resume", "resume", "os_compute_api:os-suspend-server:resume"),
        plain("unrescue", "unrescue", "os_compute_api:os-unrescue"),
        ActionRoute(
            name="rescue",
            handler=handlers.rescue,
            policy="os_compute_api:os-rescue",
            body=RescueBody,
            status=200,
            answer={"adminPass?": str},
        ),
        ActionRoute(
            name="changePassword",
            handler=handlers.change_password,
            policy="os_compute_api:os-admin-password",
            body=ChangePasswordBody,
        ),
        ActionRoute(
            name="trigger_crash_dump",
            handler=handlers.trigger_crash_dump,
            policy="os_compute_api:servers:trigger_crash_dump",
            body=CrashDumpBody,
            versions=since(17),
        ),
        ActionRoute(
            name="forceDelete",
            handler=handlers.force_delete,
            policy="os_compute_api:os-deferred-delete:force",
            body=bare_body("forceDelete"),
        ),
        ActionRoute(
            name="restore",
            handler=handlers.restore,
            policy="os_compute_api:os-deferred-delete:restore",
            body=bare_body("restore"),
        ),
        ActionRoute(name="reboot", handler=handlers.reboot, policy="os_compute_api:servers:reboot", body=RebootBody),
        replace(lock, body=bare_body("lock"), versions=until(72)),
        replace(lock, versions=since(73)),
        ActionRoute(
            name="unlock",
            handler=handlers.unlock,
            policy="os_compute_api:os-lock-server:unlock",
            body=bare_body("unlock"),
        ),
        ActionRoute(
            name="addSecurityGroup",
            handler=handlers.add_security_group,
            policy="os_compute_api:os-security-groups:add",
            body=AddSecurityGroupBody,
        ),
        ActionRoute(
            name="removeSecurityGroup",
            handler=handlers.remove_security_group,
            policy="os_compute_api:os-security-groups:remove",
            body=RemoveSecurityGroupBody,
        ),
        ActionRoute(
            name="os-resetState",
            handler=handlers.reset_state,
            policy="os_compute_api:os-admin-actions:reset_state",
            body=ResetStateBody,
        ),
        ActionRoute(
            name="injectNetworkInfo",
            handler=handlers.inject_network_info,
            policy="os_compute_api:os-admin-actions:inject_network_info",
            body=bare_body("injectNetworkInfo"),
        ),
        ActionRoute(
            name="os-getConsoleOutput",
            handler=handlers.console_output,
            policy="os_compute_api:os-console-output",
            body=ConsoleOutputBody,
            status=200,
            answer={"output": str},
        ),
    ]
    return action_routes(table)
