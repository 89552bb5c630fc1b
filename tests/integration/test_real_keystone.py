"""A real Keystone in an environment of its own: our client works with it, and our service answers like it."""

import base64
import os
import secrets
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from micronova.clients.identity.catalog import Catalog
from micronova.clients.identity.client import IdentityClient, ServiceToken
from micronova.http.auth import KeystoneTokens
from micronova.http.client import Answer, ASGITransport, HTTPTransport, Transport
from micronova.objects.clock import SystemClock
from micronova.objects.context import RequestContext
from micronova.objects.errors import Unauthorized, Unavailable
from tests.peers import peer
from tests.services.process import end, free_port, wait_until
from tests.unit.embedded.identity.harness import cloud_at, sqlite_at

# The first run installs Keystone, which takes about a minute.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PASSWORD = "admin-password"
CONTEXT = RequestContext(request_id="req-1")
NOW = SystemClock().now

CONFIGURATION = """
[DEFAULT]
log_file = {directory}/keystone.log
[database]
connection = sqlite:///{directory}/keystone.db
[fernet_tokens]
key_repository = {directory}/keys
[fernet_receipts]
key_repository = {directory}/keys
[credential]
key_repository = {directory}/keys
[identity]
password_hash_algorithm = bcrypt
password_hash_rounds = 4
[cache]
enabled = true
backend = dogpile.cache.memory
[oslo_policy]
enforce_scope = true
enforce_new_defaults = true
"""

# The port comes first: Keystone takes the words of the command line for its own.
SERVER = """
import sys
port = int(sys.argv.pop())
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from keystone.server.wsgi import initialize_public_application

class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

class Quiet(WSGIRequestHandler):
    def log_message(self, *arguments):
        pass

make_server("127.0.0.1", port, initialize_public_application(), Server, Quiet).serve_forever()
"""


@pytest.fixture(scope="module")
def keystone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the URL of a Keystone that was bootstrapped just now."""
    programs = peer("keystone", "keystone==30.0.0") / "bin"
    directory = tmp_path_factory.mktemp("keystone")
    (directory / "keystone.conf").write_text(CONFIGURATION.format(directory=directory))
    keys = directory / "keys"
    keys.mkdir(mode=0o700)
    for number in ("0", "1"):
        (keys / number).write_bytes(base64.urlsafe_b64encode(secrets.token_bytes(32)))
        (keys / number).chmod(0o600)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "OS_KEYSTONE_CONFIG_DIR": str(directory)}
    manage = (str(programs / "keystone-manage"), "--config-file", str(directory / "keystone.conf"))
    urls = [word for kind in ("public", "internal", "admin") for word in (f"--bootstrap-{kind}-url", f"{url}/v3")]
    for command in (
        ["db_sync"],
        ["bootstrap", "--bootstrap-password", PASSWORD, "--bootstrap-region-id", "RegionOne", *urls],
    ):
        subprocess.run([*manage, *command], check=True, env=environment, capture_output=True)
    log = (directory / "server.log").open("wb")
    server = subprocess.Popen(
        [programs / "python", "-c", SERVER, str(port)], env=environment, stdout=log, stderr=log, start_new_session=True
    )

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/v3", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        wait_until(answers, server, directory / "server.log")
        yield url
    finally:
        end(server, signal.SIGTERM)
        log.close()
        shutil.rmtree(directory, ignore_errors=True)


class Client:
    """A plain client of either service."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    async def request(
        self, method: str, path: str, body: Any = None, token: str | None = None, subject: str | None = None
    ) -> Answer:
        headers = {"content-type": "application/json"}
        if token:
            headers["x-auth-token"] = token
        if subject:
            headers["x-subject-token"] = subject
        data = None if body is None else msgspec.json.encode(body)
        return await self.transport.request(method, f"/v3{path}", headers, data)

    async def token(self, user: str, password: str, scope: Any) -> str:
        proof = {"user": {"name": user, "domain": {"id": "default"}, "password": password}}
        auth = {"identity": {"methods": ["password"], "password": proof}, "scope": scope}
        answer = await self.request("POST", "/auth/tokens", {"auth": auth})
        assert answer.status == 201, answer
        return answer.headers["x-subject-token"]

    async def admin(self) -> str:
        return await self.token("admin", PASSWORD, {"project": {"name": "admin", "domain": {"id": "default"}}})


@pytest.fixture
async def real(keystone: str) -> AsyncIterator[Client]:
    transport = HTTPTransport(keystone)
    yield Client(transport)
    await transport.close()


async def made(client: Client, admin: str, path: str, key: str, **attributes: Any) -> dict[str, Any]:
    answer = await client.request("POST", path, {key: attributes}, admin)
    assert answer.status == 201, answer
    return dict(answer.json()[key])


class World:
    """What the tests of our client need to exist in Keystone."""

    def __init__(self, client: Client, admin: str, user: dict[str, Any], project: dict[str, Any]) -> None:
        self.client = client
        self.admin = admin
        self.user = user
        self.project = project

    async def login(self) -> str:
        return await self.client.token(self.user["name"], "secret", {"project": {"id": self.project["id"]}})


@pytest.fixture
async def world(real: Client) -> World:
    """Make a project with a member, and a service user with nothing but the service role."""
    admin = await real.admin()
    name = secrets.token_hex(6)
    roles = {role["name"]: role["id"] for role in (await real.request("GET", "/roles", token=admin)).json()["roles"]}
    project = await made(real, admin, "/projects", "project", name=name)
    user = await made(real, admin, "/users", "user", name=name, password="secret")
    grant = f"/projects/{project['id']}/users/{user['id']}/roles/{roles['member']}"
    assert (await real.request("PUT", grant, token=admin)).status == 204
    found = await real.request("GET", "/users?name=micronova", token=admin)
    if not found.json()["users"]:
        service = await made(real, admin, "/projects", "project", name="service")
        micronova = await made(real, admin, "/users", "user", name="micronova", password="service-password")
        grant = f"/projects/{service['id']}/users/{micronova['id']}/roles/{roles['service']}"
        assert (await real.request("PUT", grant, token=admin)).status == 204
    return World(real, admin, user, project)


@pytest.fixture
def token(world: World) -> ServiceToken:
    return ServiceToken(
        world.client.transport, username="micronova", password="service-password", project_name="service", now=NOW
    )


@pytest.fixture
def identity(world: World, token: ServiceToken) -> IdentityClient:
    return IdentityClient(world.client.transport, token)


async def test_a_valid_token_is_accepted(world: World, identity: IdentityClient) -> None:
    caller = await KeystoneTokens(identity, NOW).authenticate(await world.login(), CONTEXT)
    assert caller.user_id == world.user["id"] and caller.user_name == world.user["name"]
    assert caller.project_id == world.project["id"] and caller.project_name == world.project["name"]
    assert set(caller.roles) == {"member", "reader"}
    assert caller.user_domain_id == caller.project_domain_id == "default"
    assert NOW() < caller.expires_at < NOW() + 24 * 3600
    system = await world.client.token("admin", PASSWORD, {"system": {"all": True}})
    caller = await KeystoneTokens(identity, NOW).authenticate(system, CONTEXT)
    assert caller.system_scope == "all" and "admin" in caller.roles and caller.project_id == ""


async def test_services_are_found_in_its_catalog(world: World, token: ServiceToken, keystone: str) -> None:
    catalog = Catalog(token, SystemClock(), region="RegionOne")
    assert await catalog.endpoint("identity") == keystone
    with pytest.raises(Unavailable, match="no endpoint of the image service in region RegionOne"):
        await catalog.endpoint("image")
    service = await made(world.client, world.admin, "/services", "service", type="image", name="glance")
    for interface, url in (("public", "http://public.example"), ("internal", "http://glance.example:9292/v2/")):
        endpoint = {"service_id": service["id"], "interface": interface, "url": url, "region_id": "RegionOne"}
        await made(world.client, world.admin, "/endpoints", "endpoint", **endpoint)
    await catalog.refresh()
    assert await catalog.endpoint("image") == "http://glance.example:9292"
    assert (await world.client.request("DELETE", f"/services/{service['id']}", token=world.admin)).status == 204


async def test_invalid_and_revoked_tokens_are_refused(world: World, identity: IdentityClient) -> None:
    tokens = KeystoneTokens(identity, NOW, remember=0)
    for forged in ("forged", "gAAAAAB" + "x" * 180, "mn1.AAAA", "é"):
        with pytest.raises(Unauthorized):
            await tokens.authenticate(forged, CONTEXT)
    one, other = await world.login(), await world.login()
    await tokens.authenticate(one, CONTEXT)
    assert (await world.client.request("DELETE", "/auth/tokens", token=one, subject=one)).status == 204
    with pytest.raises(Unauthorized):
        await tokens.authenticate(one, CONTEXT)
    await tokens.authenticate(other, CONTEXT)
    off = {"user": {"enabled": False}}
    path = f"/users/{world.user['id']}"
    assert (await world.client.request("PATCH", path, off, world.admin)).status == 200
    with pytest.raises(Unauthorized):
        await tokens.authenticate(other, CONTEXT)


async def test_the_service_users_token(world: World, token: ServiceToken, identity: IdentityClient) -> None:
    mine = await token.get()
    assert await token.get() == mine
    assert (await world.client.request("DELETE", "/auth/tokens", token=mine, subject=mine)).status == 204
    assert (await identity.validate(await world.login()))["user"]["id"] == world.user["id"], "it gets another"
    assert await token.get() != mine


async def test_whether_a_project_exists(world: World, identity: IdentityClient) -> None:
    assert await identity.project_exists(world.project["id"], token=world.admin)
    assert not await identity.project_exists("0" * 32, token=world.admin)
    assert await identity.project_exists("0" * 32), "Keystone does not tell a service user: it is believed"


# --- the same conversation with Keystone and with ours ---


def by_credential(**proof: Any) -> dict[str, Any]:
    return {"auth": {"identity": {"methods": ["application_credential"], "application_credential": proof}}}


# Who asks, method, path, body, name under which the answer's id is kept. {name} in a path or body is a kept id.
TALK: list[tuple[str, str, str, Any, str]] = [
    ("nobody", "GET", "", None, ""),
    ("nobody", "GET", "/projects", None, ""),
    # While all projects have the same fields: the services begin with different ones.
    ("admin", "GET", "/projects?limit=1", None, ""),
    ("admin", "POST", "/projects", {"project": {"name": "talk", "tags": ["t"], "colour": "red"}}, "p"),
    ("admin", "POST", "/projects", {"project": {"name": "talk"}}, ""),
    ("admin", "POST", "/projects", {"project": {}}, ""),
    ("admin", "POST", "/projects", {"project": {"name": 5}}, ""),
    ("admin", "POST", "/projects", {"project": {"name": "x", "domain_id": "nowhere"}}, ""),
    ("admin", "POST", "/projects", {"project": {"name": "x", "options": {"zork": 1}}}, ""),
    ("admin", "GET", "/projects/{p}", None, ""),
    ("admin", "GET", "/projects/nothing", None, ""),
    ("admin", "GET", "/projects?name=talk", None, ""),
    ("admin", "GET", "/projects?limit=1&marker=nothing", None, ""),
    ("admin", "GET", "/projects?enabled=perhaps", None, ""),
    ("admin", "GET", "/projects?is_domain=true", None, ""),
    ("admin", "PATCH", "/projects/{p}", {"project": {"domain_id": "other"}}, ""),
    ("admin", "POST", "/projects", {"project": {"name": "below", "parent_id": "{p}"}}, "below"),
    ("admin", "GET", "/projects/{below}?parents_as_ids", None, ""),
    ("admin", "GET", "/projects/{p}?subtree_as_list", None, ""),
    ("admin", "DELETE", "/projects/{p}", None, ""),
    ("admin", "DELETE", "/projects/{below}", None, ""),
    ("admin", "GET", "/projects/{p}/tags", None, ""),
    ("admin", "PUT", "/projects/{p}/tags", {"tags": ["a", "a"]}, ""),
    ("admin", "GET", "/projects/{p}/tags/t", None, ""),
    ("admin", "GET", "/projects/{p}/tags/u", None, ""),
    ("admin", "POST", "/users", {"user": {"name": "talk", "password": "secret", "email": "a@b"}}, "u"),
    ("admin", "POST", "/users", {"user": {"name": "talk"}}, ""),
    ("admin", "POST", "/users", {"user": {"name": "x", "password": 5}}, ""),
    ("admin", "POST", "/users", {"user": {"name": "x", "domain_id": "nowhere"}}, ""),
    ("admin", "GET", "/users/{u}", None, ""),
    ("admin", "PATCH", "/users/{u}", {"user": {}}, ""),
    ("admin", "GET", "/users?name=talk&enabled=true&domain_id=default", None, ""),
    ("admin", "GET", "/roles?name=member", None, "member"),
    ("admin", "GET", "/roles?name=admin", None, "root"),
    ("admin", "PUT", "/projects/{p}/users/{u}/roles/{member}", None, ""),
    ("admin", "HEAD", "/projects/{p}/users/{u}/roles/{member}", None, ""),
    ("admin", "GET", "/projects/{p}/users/{u}/roles", None, ""),
    ("admin", "PUT", "/projects/nothing/users/{u}/roles/{member}", None, ""),
    ("admin", "DELETE", "/projects/{p}/users/{u}/roles/{root}", None, ""),
    ("admin", "GET", "/role_assignments?user.id={u}", None, ""),
    ("admin", "GET", "/role_assignments?user.id={u}&include_names", None, ""),
    ("admin", "GET", "/role_assignments?effective&scope.project.id={p}", None, ""),
    ("admin", "GET", "/role_assignments?effective&group.id=x", None, ""),
    ("admin", "GET", "/users/{u}/projects", None, ""),
    ("user", "GET", "/users/{u}", None, ""),
    ("user", "GET", "/users/nothing", None, ""),
    ("user", "GET", "/users", None, ""),
    ("user", "GET", "/projects", None, ""),
    ("user", "GET", "/projects/{p}", None, ""),
    ("user", "GET", "/domains/default", None, ""),
    ("user", "GET", "/domains", None, ""),
    ("user", "GET", "/regions", None, ""),
    ("user", "GET", "/services", None, ""),
    ("user", "GET", "/role_assignments", None, ""),
    ("user", "POST", "/users", {"user": {"name": "y"}}, ""),
    ("user", "PUT", "/projects/{p}/users/{u}/roles/{root}", None, ""),
    ("user", "PUT", "/system/users/{u}/roles/{root}", None, ""),
    ("user", "GET", "/auth/projects", None, ""),
    ("user", "GET", "/auth/domains", None, ""),
    ("user", "GET", "/auth/system", None, ""),
    ("user", "GET", "/auth/catalog", None, ""),
    ("user", "POST", "/users/{u}/application_credentials", {"application_credential": {"name": "c"}}, "c"),
    ("user", "POST", "/users/{u}/application_credentials", {"application_credential": {"name": "c"}}, ""),
    ("user", "POST", "/users/{u}/application_credentials", {"application_credential": {"zork": "c"}}, ""),
    (
        "user",
        "POST",
        "/users/{u}/application_credentials",
        {"application_credential": {"name": "d", "roles": [{"name": "admin"}]}},
        "",
    ),
    (
        "user",
        "POST",
        "/users/{u}/application_credentials",
        {"application_credential": {"name": "d", "roles": [{"name": "nothing"}]}},
        "",
    ),
    (
        "user",
        "POST",
        "/users/{u}/application_credentials",
        {"application_credential": {"name": "m", "secret": "s", "roles": [{"name": "member"}]}},
        "m",
    ),
    ("nobody", "POST", "/auth/tokens", by_credential(id="{m}", secret="s"), ""),
    ("nobody", "POST", "/auth/tokens", by_credential(id="{m}", secret="wrong"), ""),
    ("nobody", "POST", "/auth/tokens", by_credential(id="nothing", secret="s"), ""),
    ("nobody", "POST", "/auth/tokens", by_credential(name="nothing", secret="s", user={"id": "{u}"}), ""),
    ("nobody", "POST", "/auth/tokens", by_credential(name="m", secret="s"), ""),
    ("nobody", "POST", "/auth/tokens", {"auth": {"identity": {"methods": ["token"], "token": {"id": "forged"}}}}, ""),
    ("nobody", "POST", "/auth/tokens", {"auth": {"identity": {"methods": ["zork"], "zork": {}}}}, ""),
    ("nobody", "POST", "/auth/tokens", {"auth": {"identity": {"methods": ["password"]}}}, ""),
    ("nobody", "POST", "/auth/tokens", {"auth": {}}, ""),
    ("user", "PUT", "/projects", {}, ""),
    ("admin", "POST", "/users/{u}/application_credentials", {"application_credential": {"name": "e"}}, ""),
    ("user", "GET", "/users/{u}/application_credentials", None, ""),
    ("user", "GET", "/users/{u}/application_credentials/{c}", None, ""),
    ("user", "DELETE", "/users/{u}/application_credentials/{c}", None, ""),
    ("admin", "POST", "/groups", {"group": {"name": "talk"}}, "g"),
    ("admin", "PUT", "/groups/{g}/users/{u}", None, ""),
    ("admin", "HEAD", "/groups/{g}/users/{u}", None, ""),
    ("admin", "GET", "/groups/{g}/users", None, ""),
    ("admin", "GET", "/users/{u}/groups", None, ""),
    ("admin", "PUT", "/groups/nothing/users/{u}", None, ""),
    ("admin", "DELETE", "/groups/{g}", None, ""),
    ("admin", "POST", "/domains", {"domain": {"name": "talk"}}, "d"),
    ("admin", "DELETE", "/domains/{d}", None, ""),
    ("admin", "PATCH", "/domains/{d}", {"domain": {"enabled": False}}, ""),
    ("admin", "DELETE", "/domains/{d}", None, ""),
    ("admin", "POST", "/roles", {"role": {"name": "talk"}}, "r"),
    ("admin", "PUT", "/roles/{r}/implies/{member}", None, ""),
    ("admin", "PUT", "/roles/{r}/implies/{root}", None, ""),
    ("admin", "GET", "/roles/{r}/implies", None, ""),
    ("admin", "PATCH", "/roles/{root}", {"role": {"name": "x"}}, ""),
    ("admin", "DELETE", "/roles/{r}", None, ""),
    ("admin", "POST", "/services", {"service": {"type": "dns", "name": "d"}}, "s"),
    ("admin", "POST", "/endpoints", {"endpoint": {"service_id": "{s}", "interface": "public", "url": "http://x"}}, "e"),
    ("admin", "POST", "/endpoints", {"endpoint": {"service_id": "{s}", "interface": "zork", "url": "http://x"}}, ""),
    ("admin", "GET", "/endpoints?service_id={s}", None, ""),
    ("admin", "GET", "/endpoints/{e}", None, ""),
    ("admin", "DELETE", "/services/{s}", None, ""),
    ("admin", "GET", "/limits", None, ""),
    ("admin", "GET", "/registered_limits", None, ""),
    ("admin", "DELETE", "/projects/{p}/users/{u}/roles/{member}", None, ""),
    ("user", "GET", "/users/{u}", None, ""),
    ("admin", "DELETE", "/users/{u}", None, ""),
    ("admin", "DELETE", "/projects/{p}", None, ""),
]


def shape(value: Any, where: str = "") -> set[str]:
    """Return the paths of all keys, without what is below attributes that hold anything."""
    if isinstance(value, dict):
        found = set()
        for key, inner in value.items():
            name = "ID" if len(key) == 32 else key
            found |= {f"{where}.{name}"} | shape(inner, f"{where}.{name}")
        return found
    if isinstance(value, list):
        return set().union(*(shape(each, f"{where}[]") for each in value)) if value else set()
    return set()


async def talk(client: Client) -> list[tuple[str, int, set[str]]]:
    """Have the conversation; return what was asked, the status, and the shape and the roles of a successful answer."""
    tokens: dict[str, str | None] = {"nobody": None, "admin": await client.admin()}
    ids: dict[str, str] = {}
    heard = []
    for who, method, path, body, keep in TALK:
        if who == "user" and who not in tokens:
            tokens[who] = await client.token("talk", "secret", {"project": {"id": ids["p"]}})
        text = msgspec.json.encode(body).decode()
        for name, key in ids.items():
            path, text = path.replace(f"{{{name}}}", key), text.replace(f"{{{name}}}", key)
        answer = await client.request(method, path, msgspec.json.decode(text), tokens[who])
        said = answer.json() if answer.body and answer.status < 300 else {}
        if keep:
            [found] = [value for key, value in said.items() if key not in ("links", "truncated")]
            ids[keep] = found[0]["id"] if isinstance(found, list) else found["id"]
        told = shape(said) | ({f"Allow: {answer.headers.get('allow') is not None}"} if answer.status == 405 else set())
        if method == "POST":  # the roles of a token or an application credential
            [*inner] = (value for value in said.values() if isinstance(value, dict) and "roles" in value)
            told |= {f"role {role['name']}" for value in inner for role in value["roles"]}
        heard.append((f"{who}: {method} {path}", answer.status, told))
    return heard


async def test_ours_answers_like_keystone(real: Client, tmp_path: Path) -> None:
    theirs = await talk(real)
    async with cloud_at(sqlite_at(tmp_path)) as cloud:
        ours = await talk(Client(ASGITransport(cloud.identity.service.app)))
    differences = []
    for step, (one, two) in zip(TALK, zip(theirs, ours, strict=True), strict=True):
        (asked, status, told), (_, our_status, we_told) = one, two
        missing = {each for each in told - we_told if not each.startswith(".catalog[]")}
        if status != our_status or missing:
            differences.append((step[:3], asked, status, our_status, sorted(missing)))
    assert not differences
