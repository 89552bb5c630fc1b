"""The metadata service: what guests read through the proxies of their networks, and what nobody else can."""

import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.conf.settings import load
from micronova.http.client import Answer, HTTPTransport
from micronova.http.host_keys import HostKeyring, sign_metadata
from micronova.http.sockets import listen
from micronova.metadata import ec2, openstack
from micronova.objects.errors import MicronovaError
from tests.functional.full_cloud import SETTINGS, FullCloud, Person, full_cloud
from tests.functional.good_requests import KEY, C, N
from tests.functional.metadata_proxies import MetadataProxies, guest_port, keys_of
from tests.schemas.tempest import check

__all__ = ["full_cloud"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCRIPT = b"#!/bin/sh\necho \xff hello\n"


@dataclass
class Owner:
    """Somebody with a server that runs, at the same address as everybody else's."""

    cloud: FullCloud
    person: Person
    server: str
    network: str
    host: str

    @property
    def headers(self) -> dict[str, str]:
        """What the proxy of the server's network sends."""
        return signed(self.cloud, self.host, self.server, self.person.project_id)

    async def read(self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Answer:
        transport = self.cloud.process.clients.metadata()
        return await transport.request(method, path, self.headers if headers is None else headers, None)

    async def text(self, path: str) -> str:
        answer = await self.read(path)
        assert answer.status == 200, (path, answer)
        assert answer.headers["content-type"].startswith("text/plain")
        return answer.body.decode()

    async def document(self, path: str) -> Any:
        answer = await self.read(path)
        assert answer.status == 200, (path, answer)
        assert answer.headers["content-type"] == "application/json"
        return answer.json()


def signed(
    cloud: FullCloud, host: str, server: str, project: str, keyring: HostKeyring | None = None, lifetime: float = 900.0
) -> dict[str, str]:
    """What the proxies of a host say, if somebody with this server and project asks."""
    clients, now = cloud.process.clients, cloud.process.clock.now()
    keys = (keyring or clients.keyring()).issue(host, now, lifetime)
    return {
        "x-instance-id": server,
        "x-tenant-id": project,
        "x-forwarded-for": "10.9.0.5",
        "x-metadata-host": host,
        "x-metadata-key-expires": str(keys.expires_at),
        "x-instance-id-signature": sign_metadata(keys.metadata_key, host, server, project, "10.9.0.5"),
    }


async def _owner(cloud: FullCloud, name: str) -> Owner:
    person = await cloud.person("member")
    network = await person.make(f"{N}/networks", "network", name="private")
    await person.make(f"{N}/subnets", "subnet", network_id=network["id"], cidr="10.9.0.0/24", ip_version=4)
    await person.make(f"{C}/os-keypairs", "keypair", name="mine", public_key=KEY, type="ssh")
    image = (await person.do("GET", "/image/v2/images?name=test-image"))["images"][0]["id"]
    server = await person.make(
        f"{C}/servers", "server", name=name, imageRef=image, flavorRef="1", key_name="mine",
        networks=[{"uuid": network["id"], "fixed_ip": "10.9.0.5", "tag": "front"}], metadata={"role": name},
        user_data=base64.b64encode(SCRIPT).decode(),
    )  # fmt: skip

    async def active() -> bool | None:
        shown = (await person.do("GET", f"{C}/servers/{server['id']}"))["server"]
        assert shown["status"] != "ERROR", shown
        return True if shown["status"] == "ACTIVE" else None

    await cloud.until(active, "the server to run")
    shown = (await cloud.admin.do("GET", f"{C}/servers/{server['id']}"))["server"]
    return Owner(cloud, person, server["id"], network["id"], shown["OS-EXT-SRV-ATTR:host"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def owner(full_cloud: FullCloud) -> AsyncIterator[Owner]:
    yield await _owner(full_cloud, "web")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(full_cloud: FullCloud) -> AsyncIterator[Owner]:
    yield await _owner(full_cloud, "db")


# --- EC2 -----------------------------------------------------------------------------------------------------------

VERSIONS = [*ec2.VERSIONS, "latest"]


async def test_versions(owner: Owner) -> None:
    for path in ("/", "/ec2", "/ec2/"):
        assert (await owner.text(path)).split("\n") == VERSIONS
    assert (await owner.text("/openstack")).split("\n") == [*openstack.VERSIONS, "latest"]
    assert (await owner.read("/", headers={})).status == 200  # that there is metadata is no secret


async def test_directories(owner: Owner) -> None:
    for top in ("/latest", "/latest/", "/ec2/latest", "//latest//"):
        assert await owner.text(top) == "meta-data/\nuser-data"
    names = (await owner.text("/latest/meta-data/")).split("\n")
    assert names == sorted(names)
    assert {"instance-id", "hostname", "public-keys/", "placement/", "block-device-mapping/"} <= set(names)
    assert await owner.text("/latest/meta-data/public-keys/") == "0=mine"
    assert await owner.text("/latest/meta-data/public-keys/0/") == "openssh-key"
    assert await owner.text("/latest/meta-data/public-keys/0/openssh-key") == KEY
    assert await owner.text("/latest/meta-data/placement/") == "availability-zone"
    assert await owner.text("/latest/meta-data/placement/availability-zone") == "nova"
    assert await owner.text("/latest/meta-data/block-device-mapping/root") == "/dev/vda"


async def test_values(owner: Owner) -> None:
    root = "/latest/meta-data"
    assert await owner.text(f"{root}/hostname") == "web"
    assert await owner.text(f"{root}/local-ipv4") == "10.9.0.5"
    assert await owner.text(f"{root}/public-ipv4") == ""
    assert await owner.text(f"{root}/instance-type") == "m1.tiny"
    assert await owner.text(f"{root}/security-groups") == "default"
    assert await owner.text(f"{root}/ami-launch-index") == "0"
    assert (await owner.text(f"{root}/reservation-id")).startswith("r-")
    assert (await owner.read("/latest/user-data")).body == SCRIPT


async def test_every_version_of_ec2_can_be_walked(owner: Owner) -> None:
    async def walk(path: str) -> int:
        found = 0
        for name in (await owner.text(path)).split("\n"):
            if name == "user-data":
                continue
            name = name.replace("0=mine", "0/")
            found += await walk(f"{path}{name}") if name.endswith("/") else len(await owner.text(f"{path}{name}")) >= 0
        return found

    counted = [await walk(f"/{version}/") for version in VERSIONS]
    assert counted == sorted(counted) and counted[0] > 5 and counted[-1] > counted[0]


async def test_floating_addresses(owner: Owner) -> None:
    person = owner.person
    public = (await person.do("GET", f"{N}/networks?router:external=True"))["networks"][0]["id"]
    subnet = (await person.do("GET", f"{N}/subnets?network_id={owner.network}"))["subnets"][0]["id"]
    router = await person.make(f"{N}/routers", "router", external_gateway_info={"network_id": public})
    await person.do("PUT", f"{N}/routers/{router['id']}/add_router_interface", {"subnet_id": subnet})
    port = (await person.do("GET", f"{N}/ports?device_id={owner.server}"))["ports"][0]["id"]
    made = await person.make(f"{N}/floatingips", "floatingip", floating_network_id=public, port_id=port)
    guest = await _uncached(owner)
    try:

        async def told() -> bool | None:
            answer = await guest.read("/latest/meta-data/public-ipv4")
            return True if answer.body.decode() == made["floating_ip_address"] else None

        await owner.cloud.until(told, "the address to be known")
    finally:
        await guest.close()


# --- OpenStack -----------------------------------------------------------------------------------------------------


async def test_documents(owner: Owner) -> None:
    names = (await owner.text("/openstack/latest/")).split("\n")
    assert set(names) == {
        "meta_data.json", "user_data", "password", "vendor_data.json", "network_data.json", "vendor_data2.json",
    }  # fmt: skip
    meta = await owner.document("/openstack/latest/meta_data.json")
    assert meta["uuid"] == owner.server and meta["hostname"] == meta["name"] == "web"
    assert meta["meta"] == {"role": "web"} and meta["public_keys"] == {"mine": KEY}
    assert meta["project_id"] == owner.person.project_id and meta["availability_zone"] == "nova"
    assert meta["devices"][0]["tags"] == ["front"] and meta["dedicated_cpus"] == []
    assert len(base64.b64decode(meta["random_seed"])) == 512
    assert "admin_pass" not in meta and "files" not in meta
    assert (await owner.document("/openstack/latest/meta_data.json"))["random_seed"] != meta["random_seed"]
    networks = await owner.document("/openstack/latest/network_data.json")
    assert networks["networks"][0]["network_id"] == owner.network and networks["networks"][0]["type"] == "ipv4_dhcp"
    assert (await owner.read("/openstack/latest/user_data")).body == SCRIPT
    assert await owner.document("/openstack/latest/vendor_data.json") == {}
    assert await owner.document("/openstack/latest/vendor_data2.json") == {"static": {}}


@pytest.mark.parametrize("version", [*openstack.VERSIONS, "latest"])
async def test_every_version_of_openstack_has_just_what_it_lists(owner: Owner, version: str) -> None:
    listed = (await owner.text(f"/openstack/{version}")).split("\n")
    every = ["meta_data.json", "user_data", "password", "vendor_data.json", "network_data.json", "vendor_data2.json"]
    for name in every:
        assert (await owner.read(f"/openstack/{version}/{name}")).status == (200 if name in listed else 404), name


@pytest.mark.parametrize(
    "path",
    ["/zork", "/2026-01-01/meta-data", "/latest/zork", "/latest/meta-data/zork", "/latest/meta-data/hostname/x",
     "/latest/meta-data/public-keys/1", "/openstack/2026-01-01", "/openstack/latest/zork",
     "/openstack/latest/meta_data.json/x", "/openstack/content", "/openstack/content/0000", "/openstack/zork/password",
     "/openstack/2012-08-10/password", "/latest/api/token", "/latest/../openstack", "/%00", "/latest/%ff"],
)  # fmt: skip
async def test_what_there_is_not(owner: Owner, path: str) -> None:
    answer = await owner.read(path)
    assert answer.status == 404, answer


async def test_changes_of_a_server_are_seen_when_what_was_remembered_is_old(owner: Owner) -> None:
    guest = await _uncached(owner)
    try:
        await owner.person.do("POST", f"{C}/servers/{owner.server}/metadata", {"metadata": {"new": "item"}})
        meta = json.loads((await guest.read("/openstack/latest/meta_data.json")).body)
        assert meta["meta"]["new"] == "item"
    finally:
        await guest.close()


# --- a service of its own process ----------------------------------------------------------------------------------


class Alone:
    """The metadata role by itself, on a port, that remembers nothing; asked as some guest's proxy asks."""

    def __init__(self, owner: Owner, settings: Mapping[str, Any]) -> None:
        self._owner = owner
        self._settings = settings

    async def start(self) -> "Alone":
        place = self._owner.cloud.process.directory.path
        sections = {**SETTINGS, "api": {"metadata_cache_expiration": 0.0, **self._settings}}
        self.process = Process(load(None, {}, **sections), ["metadata"], StateDirectory(place))
        sock = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}/metadata"
        self._transport = HTTPTransport(self.url.removesuffix("/metadata"))
        try:
            await self.process.start(sock)
        except BaseException:
            sock.close()
            raise
        return self

    async def read(self, path: str) -> Answer:
        return await self._transport.request("GET", path, self._owner.headers, None)

    async def close(self) -> None:
        await self._transport.close()
        await self.process.stop()


async def _uncached(owner: Owner, **settings: Any) -> Alone:
    return await Alone(owner, settings).start()


async def test_the_role_by_itself(owner: Owner, tmp_path: Any) -> None:
    file = tmp_path / "vendor.json"
    file.write_text('{"greeting": "hello"}')
    guest = await _uncached(owner, vendordata_jsonfile_path=str(file))
    try:
        for root in ("", "/metadata"):
            assert (await guest.read(f"{root}/latest/meta-data/hostname")).body == b"web"
            assert (await guest.read(f"{root}/openstack/latest/vendor_data.json")).json() == {"greeting": "hello"}
        assert (await guest.read("/compute/v2.1/")).status == 404
    finally:
        await guest.close()


async def test_proxies_in_another_process(owner: Owner, tmp_path: Any) -> None:
    guest = await _uncached(owner)
    settings = load(environ={}, default={"host": owner.host}, neutron={"metadata_url": guest.url})
    elsewhere = Process(settings, ["network-agent"], StateDirectory(tmp_path))  # only asked for the way
    elsewhere.bus = owner.cloud.process.bus  # a conductor gives the host its keys
    proxies = MetadataProxies(elsewhere.clients.metadata(), elsewhere.clients.host_keys())
    port = guest_port(owner.network, "127.0.0.5", owner.server, owner.person.project_id)
    await proxies.serve([port])
    try:
        assert await proxies.get(owner.network, "127.0.0.5", "/latest/meta-data/hostname") == (200, b"web")
        assert (await proxies.get(owner.network, "127.0.0.5", "/zork"))[0] == 404
        await guest.close()
        assert (await proxies.get(owner.network, "127.0.0.5", "/latest/meta-data/hostname"))[0] == 503
    finally:
        await proxies.close()
        await elsewhere.clients.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"vendordata_providers": ["Zork"]}, "no provider Zork"),
        ({"vendordata_jsonfile_path": "/nowhere.json"}, "/nowhere.json: No such file"),
        ({"vendordata_providers": ["DynamicJSON"], "vendordata_dynamic_targets": ["http://x"]}, "NAME@URL"),
    ],
)
async def test_settings_that_are_wrong(owner: Owner, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(MicronovaError, match=words):
        await _uncached(owner, **settings)


async def test_without_static_vendor_data(owner: Owner) -> None:
    guest = await _uncached(owner, vendordata_providers=["DynamicJSON"])
    try:
        assert (await guest.read("/openstack/latest/vendor_data.json")).status == 404
        assert (await guest.read("/openstack/latest/vendor_data2.json")).json() == {}
        assert b"vendor_data.json" not in (await guest.read("/openstack/latest")).body
    finally:
        await guest.close()


async def test_vendor_data_that_cannot_be_had(owner: Owner) -> None:
    targets = {"vendordata_providers": ["DynamicJSON"], "vendordata_dynamic_targets": ["x@http://127.0.0.1:1/"]}
    guest = await _uncached(owner, **targets)
    try:
        assert (await guest.read("/openstack/latest/vendor_data2.json")).json() == {"x": {}}
    finally:
        await guest.close()
    guest = await _uncached(owner, **targets, vendordata_dynamic_failure_fatal=True)
    try:
        answer = await guest.read("/openstack/latest/vendor_data2.json")
        assert answer.status == 503 and b"127.0.0.1" not in answer.body
        assert (await guest.read("/openstack/latest/meta_data.json")).status == 200
    finally:
        await guest.close()


# --- who may ask ---------------------------------------------------------------------------------------------------


class Doubled(dict[str, str]):
    """Headers, one of which is there twice."""

    def __init__(self, headers: Mapping[str, str], name: str, value: str) -> None:
        super().__init__(headers)
        self._more = [(name, value)]

    # A mapping cannot hold a name twice; the transports read headers with items() alone.
    def items(self) -> list[tuple[str, str]]:  # type: ignore[override]
        return [*super().items(), *self._more]


PATHS = ("/latest/meta-data/hostname", "/openstack/latest/meta_data.json", "/openstack", "/ec2", "/zork")


async def refused(owner: Owner, headers: Mapping[str, str], status: int) -> None:
    for path in PATHS:
        answer = await owner.read(path, headers)
        assert answer.status == status, (path, headers, answer)
        assert owner.server not in answer.body.decode()
    transport = owner.cloud.process.clients.metadata()
    answer = await transport.request("POST", "/openstack/latest/password", headers, b"mine now")
    assert answer.status == status
    assert (await owner.read("/openstack/latest/password")).body == b""


async def test_a_request_that_no_proxy_sent(owner: Owner, other: Owner) -> None:
    good = owner.headers
    await refused(owner, {}, 400)
    await refused(owner, {"x-auth-token": owner.person.token or ""}, 400)
    await refused(owner, {"x-auth-token": owner.cloud.admin.token or ""}, 400)
    for name in ("x-instance-id", "x-tenant-id"):
        await refused(owner, {key: value for key, value in good.items() if key != name}, 400)
        await refused(owner, {**good, name: ""}, 400)
        await refused(owner, Doubled(good, name, good[name]), 400)
        await refused(owner, Doubled(good, name.upper(), "x"), 400)
    await refused(owner, Doubled(good, "x-instance-id-signature", good["x-instance-id-signature"]), 400)
    await refused(owner, {key: good[key] for key in ("x-instance-id", "x-tenant-id")}, 403)
    wrong = (
        "",
        "0" * 64,
        "zork",
        "\xff",
        good["x-instance-id-signature"][:-1],
        good["x-instance-id-signature"].upper(),
    )
    for signature in wrong:
        await refused(owner, {**good, "x-instance-id-signature": signature}, 403)
    # A signature of one server is none of another, nor of another project or address.
    stolen = {**other.headers, "x-instance-id": owner.server, "x-tenant-id": owner.person.project_id}
    await refused(owner, stolen, 403)
    await refused(owner, {**good, "x-tenant-id": other.person.project_id}, 403)
    await refused(owner, {**good, "x-forwarded-for": "10.9.0.6"}, 403)


async def test_the_key_of_a_host(owner: Owner, other: Owner) -> None:
    project, good = owner.person.project_id, owner.headers
    another = HostKeyring(b"the key of another cloud")
    await refused(owner, signed(owner.cloud, owner.host, owner.server, project, another), 403)
    await refused(owner, signed(owner.cloud, owner.host, owner.server, project, lifetime=0), 403)  # it has run out
    later = str(int(good["x-metadata-key-expires"]) + 60)
    for expiry in ("", "zork", "1e9", "-1", later, "9" * 500, "\xb2"):
        await refused(owner, {**good, "x-metadata-key-expires": expiry}, 403)
    # Neither is the name of another host, nor none: that is for proxies with the shared secret, of which there is none.
    for name in ("elsewhere", owner.host.upper(), f"{owner.host}%00", ""):
        await refused(owner, {**good, "x-metadata-host": name}, 403)
    for name in ("x-metadata-host", "x-metadata-key-expires"):
        await refused(owner, Doubled(good, name, good[name]), 400)


async def test_a_host_is_believed_about_its_own_guests_only(owner: Owner) -> None:
    """Somebody who has stolen a host has a good key, and knows the ids of servers elsewhere."""
    await owner.read("/openstack/latest/meta_data.json")  # remembered
    stolen = signed(owner.cloud, "stolen", owner.server, owner.person.project_id)
    await refused(owner, stolen, 404)
    assert (await owner.read("/latest/meta-data/hostname")).status == 200


async def test_the_proxies_of_a_neutron(owner: Owner) -> None:
    """They sign the server's id with a secret that all of them share, and know nothing of our hosts."""
    place = StateDirectory(owner.cloud.process.directory.path)
    settings = load(None, {}, **{**SETTINGS, "neutron": {"metadata_proxy_shared_secret": "of all"}})
    service = Process(settings, ["metadata"], place)
    await service.start()
    transport = service.clients.metadata()

    def says(secret: str) -> dict[str, str]:
        signature = hmac.new(secret.encode(), owner.server.encode(), hashlib.sha256).hexdigest()
        said = {"x-instance-id": owner.server, "x-tenant-id": owner.person.project_id}
        return {**said, "x-instance-id-signature": signature}

    try:
        for headers, status in ((says("of all"), 200), (says("of some"), 403), (says(""), 403), (owner.headers, 200)):
            answer = await transport.request("GET", "/latest/meta-data/hostname", headers, None)
            assert answer.status == status
        await refused(owner, says("of all"), 403)  # where there is no such secret
        await refused(owner, says(""), 403)
    finally:
        await service.stop()


async def test_a_server_of_another_project_does_not_exist(owner: Owner, other: Owner) -> None:
    """Whoever owns a port may write somebody else's server into it: its own project is what counts."""
    await owner.read("/openstack/latest/meta_data.json")  # remembered
    project = owner.person.project_id
    await refused(owner, signed(owner.cloud, owner.host, owner.server, other.person.project_id), 404)
    await refused(owner, signed(owner.cloud, owner.host, "11111111-0000-4000-8000-00000000000f", project), 404)
    await refused(owner, signed(owner.cloud, owner.host, "' OR 1=1 --", project), 404)


async def test_methods(owner: Owner) -> None:
    assert (await owner.read("/latest/meta-data/hostname", method="HEAD")).status == 200
    for method in ("PUT", "DELETE", "PATCH"):
        assert (await owner.read("/latest/meta-data/hostname", method=method)).status == 405
    assert (await owner.read("/latest/meta-data/hostname", method="POST")).status == 405


async def test_the_same_address_in_two_networks(owner: Owner, other: Owner) -> None:
    """Through the proxies: each guest reads its own, whatever it writes into its request."""
    clients = owner.cloud.process.clients
    address = "127.0.0.5"
    every = {}
    for each in (owner, other):
        every[each.server] = MetadataProxies(clients.metadata(), keys_of(clients.keyring(), each.host))
        ports = [guest_port(one.network, address, one.server, one.person.project_id) for one in (owner, other)]
        await every[each.server].serve(ports)
    try:
        for mine, theirs, name in ((owner, other, b"web"), (other, owner, b"db")):
            proxies = every[mine.server]
            lies = [f"{key}: {value}" for key, value in theirs.headers.items()]
            for headers in ([], lies, [line.upper() for line in lies], lies * 2):
                assert await proxies.get(mine.network, address, "/latest/meta-data/hostname", *headers) == (200, name)
        # A port of one project that says that it belongs to another's server.
        proxies = every[owner.server]
        await proxies.serve([guest_port(other.network, address, owner.server, other.person.project_id)])
        assert (await proxies.get(other.network, address, "/latest/meta-data/hostname"))[0] == 404
    finally:
        for proxies in every.values():
            await proxies.close()


async def test_a_cloud_without_the_service(tmp_path: Any) -> None:
    process = Process(load(environ={}), ["conductor"], StateDirectory(tmp_path))
    proxies = MetadataProxies(process.clients.metadata(), keys_of(HostKeyring(b"0123456789abcdef"), "host"))
    await proxies.serve([guest_port("a", "127.0.0.5", "server", "project")])
    assert (await proxies.get("a", "127.0.0.5", "/"))[0] == 503
    await proxies.close()


# --- passwords -----------------------------------------------------------------------------------------------------


async def test_a_password_is_kept_once(full_cloud: FullCloud) -> None:
    owner = await _owner(full_cloud, "windows")
    person, server = owner.person, f"{C}/servers/{owner.server}/os-server-password"
    transport = full_cloud.process.clients.metadata()

    async def post(body: bytes, path: str = "/openstack/latest/password") -> int:
        return (await transport.request("POST", path, owner.headers, body)).status

    assert await person.do("GET", server) == {"password": ""}
    assert await owner.text("/openstack/latest/password") == ""
    for bad in (b"x" * 1021, b"x" * 70_000, b"\xff\xfe", b"a\x00b"):
        assert await post(bad) == 400
    assert await post(b"x", "/openstack/2012-08-10/password") == 405
    assert await post(b"") == 200  # nothing is nothing
    assert await post(b"y" * 1020, "/openstack/2013-04-04/password") == 200
    assert await post(b"other") == 409
    assert await owner.text("/openstack/latest/password") == "y" * 1020
    assert await person.do("GET", server) == {"password": "y" * 1020}
    for minor in (1, 104):
        answer = await person.request("GET", server, minor=minor)
        check("servers", "show_password", minor, answer.status, answer.json())
    answer = await person.request("DELETE", server)
    check("servers", "server_actions_delete_password", 1, answer.status, answer.body)
    assert await person.do("GET", server) == {"password": ""}
    assert await post(b"second") == 200
    assert await person.do("GET", server) == {"password": "second"}
    await person.do("DELETE", f"{C}/servers/{owner.server}")

    async def gone() -> bool | None:
        return True if (await person.request("GET", f"{C}/servers/{owner.server}")).status == 404 else None

    await full_cloud.until(gone, "the server to be gone")
    assert await post(b"too late") == 404  # also while the server is still remembered
    assert (await person.request("GET", server)).status == 404
