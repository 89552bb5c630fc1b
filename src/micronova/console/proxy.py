"""The console proxy role: it has no database and no users, only tokens that it asks a conductor about."""

import logging
from pathlib import Path

from micronova.conductor.rpcapi import ConsoleAuthAPI
from micronova.conf.console import Console
from micronova.console.app import ConsoleApp
from micronova.console.endpoints import Connector
from micronova.console.pages import Pages
from micronova.console.sessions import Sessions
from micronova.objects.clock import Clock
from micronova.rpc.bus import Bus

log = logging.getLogger(__name__)

MOUNT = "/console"


class ConsoleProxy:
    """A role: `app` is what it answers below its mount."""

    def __init__(
        self, bus: Bus, clock: Clock, settings: Console, *, state_path: Path, enforce_timeout: bool = False
    ) -> None:
        self.sessions = Sessions(ConsoleAuthAPI(bus), clock, enforce_timeout=enforce_timeout)
        self._pages = Pages(
            Path(settings.novnc_path), Path(settings.xterm_path), Path(settings.spice_html5_path)
        )
        sockets = Path(settings.socket_path) if settings.socket_path else state_path
        self.app = ConsoleApp(self.sessions, Connector(sockets), self._pages, settings.allowed_origins)

    async def start(self) -> None:
        """Say what is missing; the other console works without it."""
        for problem in self._pages.missing():
            log.warning("%s", problem)

    async def stop(self) -> None:
        """Nothing to do: the HTTP server has ended what was open."""
