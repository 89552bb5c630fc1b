"""A process without URLs of the other services finds them in the catalog of a cloud that listens on a port."""

import socket
from pathlib import Path
from typing import Any

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
    cloud.apps["/key-manager"] = _barbican
    sock = socket.create_server(("127.0.0.1", 0))
    await cloud.start(sock)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    identity = {"auth_url": f"{url}/identity/v3", "password": cloud.keys.service_password}
    elsewhere = Process(load(environ={}, identity=identity), ["conductor"], StateDirectory(tmp_path / "elsewhere"))
    images, networks, compute = (
        elsewhere.clients.image_client(),
        elsewhere.clients.network_client(),
        elsewhere.clients.compute("ports", "builds wait for them"),
    )
    assert images is not None and networks is not None
    try:
        with pytest.raises(Unavailable):
            images.download_url("x")
        await elsewhere.clients.start()
        admin = ServiceToken(
            ASGITransport(cloud.apps["/identity"]), username="admin", password=cloud.keys.admin_password,
            project_name="admin", now=cloud.clock.now,
        )  # fmt: skip
        [image] = await images.list(await admin.get())
        assert images.download_url(image.id) == f"{url}/image/v2/images/{image.id}/file"
        assert await networks.servers_of_ports() == {}
        assert isinstance(compute, ServiceClient)
        with pytest.raises(Unavailable, match="404 is not of an OpenStack service"):  # the endpoint's role does not run
            await compute.request("GET", "/servers")
        await _certificates_in_the_catalog(cloud, elsewhere, url, admin)
        with pytest.raises(SettingsError, match=r"neutron.endpoint_override"):  # a host has no service user
            elsewhere.clients.network_agent_client(keys_of(HostKeyring(bytes(16)), "host"))
    finally:
        await elsewhere.clients.close()
        await cloud.stop()


async def _barbican(scope: Any, receive: Any, send: Any) -> None:
    body = b"certificate" if scope["path"].endswith("/payload") else b'{"content_types": {}}'
    status = 200 if dict(scope["headers"])[b"x-auth-token"] == b"alice" else 401
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def _certificates_in_the_catalog(cloud: Process, elsewhere: Process, url: str, admin: ServiceToken) -> None:
    """A key manager need not be there; one that is added to the catalog is found by the next look at it."""
    certificates = elsewhere.clients.certificates()
    assert not await certificates.available()
    with pytest.raises(NotFound, match="There is no certificate"):
        await certificates.get("c1", "alice")
    identity = ServiceClient(ASGITransport(cloud.apps["/identity"]), admin.get)
    service = await identity.request("POST", "/v3/services", {"service": {"type": "key-manager", "name": "barbican"}})
    endpoint = {
        "service_id": service["service"]["id"],
        "interface": "public",
        "url": f"{url}/key-manager/v1",
        "region_id": "RegionOne",
    }
    await identity.request("POST", "/v3/endpoints", {"endpoint": endpoint})
    await elsewhere.clients.catalog().refresh()
    assert await certificates.available()
    assert await certificates.get("c1", "alice") == b"certificate"


async def _catalog(cloud: Process) -> dict[tuple[str, str], str]:
    """Return the URLs of the catalog by type and interface, once as tokens have it and once as it is listed."""
    admin = ServiceToken(
        ASGITransport(cloud.apps["/identity"]), username="admin", password=cloud.keys.admin_password,
        project_name="admin", now=cloud.clock.now,
    )  # fmt: skip
    client = ServiceClient(ASGITransport(cloud.apps["/identity"]), admin.get)
    catalog = (await client.request("GET", "/v3/auth/catalog"))["catalog"]
    shown = {(each["type"], one["interface"]): one["url"] for each in catalog for one in each["endpoints"]}
    services = {each["id"]: each["type"] for each in (await client.request("GET", "/v3/services"))["services"]}
    listed = (await client.request("GET", "/v3/endpoints"))["endpoints"]
    assert {(services[one["service_id"]], one["interface"]): one["url"] for one in listed} == shown
    return shown


async def test_the_catalog_names_services_of_other_processes(tmp_path: Path) -> None:
    """It follows the settings at every start."""
    own: dict[str, Any] = {"api": {"public_url": "https://id:5000"}}
    sections: dict[str, Any] = {
        "glance": {"endpoint_override": "http://image:9292/image"},
        "neutron": {"endpoint_override": "http://net:9696/network", "public_endpoint": "https://cloud/network"},
        "nova": {"endpoint_override": "http://api:8774/compute"},
        "cinder": {"endpoint_override": "http://volume:8776/volume/v3/"},
        "placement": {"public_endpoint": "https://cloud/placement"},
    }
    cloud = Process(load(environ={}, **own, **sections), ["identity"], StateDirectory(tmp_path))
    await cloud.start()
    shown = await _catalog(cloud)
    await cloud.stop()
    assert {key: url for key, url in shown.items() if key[1] != "admin"} == {
        ("identity", "public"): "https://id:5000/identity/v3",
        ("identity", "internal"): "https://id:5000/identity/v3",
        ("image", "public"): "http://image:9292/image",
        ("image", "internal"): "http://image:9292/image",
        ("network", "public"): "https://cloud/network",
        ("network", "internal"): "http://net:9696/network",
        ("compute", "public"): "http://api:8774/compute/v2.1",
        ("compute", "internal"): "http://api:8774/compute/v2.1",
        ("placement", "public"): "https://cloud/placement",
        ("placement", "internal"): "https://id:5000/placement",
        ("block-storage", "public"): "http://volume:8776/volume/v3",
        ("block-storage", "internal"): "http://volume:8776/volume/v3",
        ("volumev3", "public"): "http://volume:8776/volume/v3",
        ("volumev3", "internal"): "http://volume:8776/volume/v3",
    }
    cloud = Process(load(environ={}, **own), ["identity"], StateDirectory(tmp_path))
    await cloud.start()
    shown = await _catalog(cloud)
    await cloud.stop()
    assert all(url.startswith("https://id:5000/") for url in shown.values())
