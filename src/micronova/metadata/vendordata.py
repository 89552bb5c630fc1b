"""The operator's data for guests: a JSON file, and services that are asked about each guest.

A service is a target `NAME@URL`. It gets a POST with a short description of the guest, and its answer is in
vendor_data2.json under its name. If it fails, `{}` is there instead, unless failures are set to be fatal.
"""

import asyncio
import json
import logging
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from micronova.metadata.facts import VendorData
from micronova.objects.errors import Invalid, Unavailable
from micronova.objects.orders import InstanceSpec

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

STATIC: Final = "StaticJSON"
DYNAMIC: Final = "DynamicJSON"
LARGEST: Final = 1 << 20  # bytes of one answer


def read_static(path: str) -> Any:
    """Return the content of the file for all guests, or an empty document if there is no file."""
    if not path:
        return {}
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise Invalid(f"Cannot read api.vendordata_jsonfile_path {path}: {error.strerror}.") from None
    except ValueError as error:
        raise Invalid(f"api.vendordata_jsonfile_path {path} is not valid JSON: {error}.") from None


def parse_targets(targets: Sequence[str]) -> dict[str, str]:
    """Return the URLs of targets by name."""
    found: dict[str, str] = {}
    for target in targets:
        name, at, url = target.partition("@")
        if not name or not at or not url.startswith(("http://", "https://")):
            raise Invalid(f"Bad target {target!r} in api.vendordata_dynamic_targets: it should be NAME@URL.")
        if name in found or name == "static":
            raise Invalid(f"The name {name!r} in api.vendordata_dynamic_targets is taken: choose another.")
        found[name] = url
    return found


class VendorDataSource:
    """Gets the operator's data for guests."""

    def __init__(
        self,
        *,
        static: Any = None,
        targets: Mapping[str, str] | None = None,
        connect_timeout: float = 5.0,
        read_timeout: float = 5.0,
        fatal: bool = False,
        certificate: str = "",
    ) -> None:
        """Without `static` there is no vendor_data.json; `certificate` is a PEM file to verify the services with."""
        self.static = static
        self._targets = dict(targets or {})
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._fatal = fatal
        self._certificate = certificate
        self._session: aiohttp.ClientSession | None = None

    async def about(self, instance: InstanceSpec) -> VendorData:
        """Return the data for a guest; raise Unavailable if a service fails and that is fatal."""
        if not self._targets:
            return VendorData(static=self.static)
        body = json.dumps(description(instance)).encode()
        answers = await asyncio.gather(*(self._ask(name, url, body) for name, url in self._targets.items()))
        return VendorData(static=self.static, dynamic=dict(zip(self._targets, answers, strict=True)))

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, name: str, url: str, body: bytes) -> Any:
        import aiohttp

        try:
            return await self._post(url, body)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            log.warning("the vendor data service %s at %s failed: %s", name, url, error or type(error).__name__)
            if self._fatal:
                raise Unavailable(f"The vendor data service {name} does not answer as it should.") from error
            return {}

    async def _post(self, url: str, body: bytes) -> Any:
        import aiohttp

        if self._session is None:
            context = ssl.create_default_context(cafile=self._certificate) if self._certificate else True
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context, limit=20),
                timeout=aiohttp.ClientTimeout(
                    total=self._connect_timeout + self._read_timeout,
                    sock_connect=self._connect_timeout,
                    sock_read=self._read_timeout,
                ),
            )
        headers = {"content-type": "application/json", "accept": "application/json", "user-agent": "micronova"}
        async with self._session.post(url, data=body, headers=headers) as answer:
            if answer.status >= 400:
                raise ValueError(f"it answered {answer.status}")
            content = bytearray()
            async for part in answer.content.iter_chunked(1 << 16):
                content += part
                if len(content) > LARGEST:
                    raise ValueError(f"its answer is longer than {LARGEST} bytes")
            return json.loads(content) if content else {}


def description(instance: InstanceSpec) -> dict[str, Any]:
    """Return the description of a guest for a service, without passwords."""
    return {
        "project-id": instance.project_id,
        "instance-id": instance.uuid,
        "image-id": instance.image.id if instance.image else None,
        "user-data": instance.user_data,
        "hostname": instance.hostname,
        "metadata": instance.metadata,
        "boot-roles": "",
    }
