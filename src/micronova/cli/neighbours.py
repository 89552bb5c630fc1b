"""How this process reaches identity, image and network: in the process, by URL, or not at all."""

from typing import TYPE_CHECKING, Any

from micronova.http.auth import NoAuth2
from micronova.http.service import Authenticator

if TYPE_CHECKING:
    from micronova.cli.wiring import Process


class Neighbours:
    """Makes the clients of the neighbours as the settings say."""

    def __init__(self, process: "Process") -> None:
        self._process = process

    def authenticator(self) -> Authenticator:
        """Return what checks tokens."""
        if self._process.settings.api.auth_strategy == "noauth2":
            return NoAuth2()
        raise NotImplementedError

    def images(self) -> Any:
        """Return the image client; None when there is no image service."""
        return None

    def networks(self) -> Any:
        """Return the network client; None when there is no network service."""
        return None

    async def project_exists(self, project_id: str) -> bool:
        """Ask identity whether there is such a project; without identity every project does."""
        return True
