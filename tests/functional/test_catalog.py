"""A process without URLs of the other services finds them in the catalog of a cloud that listens on a port."""

import socket
from pathlib import Path

import pytest

from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.clients.identity.client import ServiceToken
from micronova.conf.settings import SettingsError, load
from micronova.http.client import ASGITransport, ServiceClient
from micronova.http.host_keys import HostKeyring
from micronova.objects.errors import NotFound, Unavailable
from tests.functional.metadata_proxies import keys_of


async def test_services_in_another_process(tmp_path: Path) -> None:
    cloud = Process(load(environ={}), ["identity", "image", "network"], StateDirectory(tmp_path / "cloud"))
    sock = socket.create_server(("127.0.0.1", 0))
    await cloud.start(sock)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    identity = {"auth_url": f"{url}/identity/v3", "password": cloud.keys.service_password}
    elsewhere = Process(load(environ={}, identity=identity), ["conductor"], StateDirectory(tmp_path / "elsewhere"))
    images, networks, compute = (
        elsewhere.clients.image_client(),
        elsewhere.clients.network_client(),
        elsewhere.clients.compute(),
    )
    assert images is not None and networks is not None
    try:
        with pytest.raises(Unavailable):
            images.ticket_url("x")
        await elsewhere.clients.start()
        admin = ServiceToken(
            ASGITransport(cloud.apps["/identity"]), username="admin", password=cloud.keys.admin_password,
            project_name="admin", now=cloud.clock.now,
        )  # fmt: skip
        [image] = await images.list(await admin.get())
        assert images.ticket_url(image.id) == f"{url}/image/v2/images/{image.id}/file"
        assert await networks.list_server_ports() == []
        assert isinstance(compute, ServiceClient)
        with pytest.raises(NotFound, match="No service is mounted here"):  # an endpoint whose role does not run
            await compute.request("GET", "/servers")
        with pytest.raises(SettingsError, match=r"neutron.endpoint_override"):  # a host has no service user
            elsewhere.clients.network_agent_client(keys_of(HostKeyring(bytes(16)), "host"))
    finally:
        await elsewhere.clients.close()
        await cloud.stop()
