"""The console proxy role. It has no database and knows no users: it asks a conductor what a token is for."""

import logging
from pathlib import Path

from micronova.conf.console import ConsoleSettings
from micronova.console.app import ConsoleApp
from micronova.console.endpoints import Connector
from micronova.console.pages import Pages
from micronova.console.sessions import ConsoleAuth, Sessions
from micronova.objects.clock import Clock

log = logging.getLogger(__name__)

MOUNT = "/console"


class ConsoleProxy:
    """The role; `app` answers the requests below MOUNT."""

    def __init__(
        self,
        conductor: ConsoleAuth,
        clock: Clock,
        settings: ConsoleSettings,
        *,
        state_path: Path,
        enforce_timeout: bool = False,
    ) -> None:
        self.sessions = Sessions(conductor, clock, enforce_timeout=enforce_timeout)
        self._pages = Pages(Path(settings.novnc_path), Path(settings.xterm_path), Path(settings.spice_html5_path))
        sockets = Path(settings.socket_path) if settings.socket_path else state_path
        self.app = ConsoleApp(self.sessions, Connector(sockets), self._pages, settings.allowed_origins)

    async def start(self) -> None:
        """Log which libraries are missing; the other consoles work without them."""
        for problem in self._pages.missing():
            log.warning("%s", problem)

    async def stop(self) -> None:
        """Do nothing: the HTTP server has already closed the connections."""
