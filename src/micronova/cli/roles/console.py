"""The console proxy."""

import msgspec

from micronova.cli.wiring import Process, Role
from micronova.conductor.rpcapi import ConsoleAuthAPI
from micronova.console.proxy import MOUNT, ConsoleProxy


async def make(process: Process) -> Role:
    """Make the console proxy."""
    assert process.bus is not None
    settings = process.settings
    console = settings.console
    if process.agent is not None:  # the only consoles are those behind the relay of this host
        console = msgspec.structs.replace(console, socket_path="")
    role = ConsoleProxy(
        ConsoleAuthAPI(process.bus),
        process.clock,
        console,
        state_path=process.directory.path if process.agent is None else process.agent.console.parent,
        enforce_timeout=settings.consoleauth.enforce_session_timeout,
    )
    process.apps[MOUNT] = role.app
    process.telemetry.metrics.gauge("micronova_console_sessions", "Open consoles.", role.sessions.__len__)
    return role
