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

from micronova.cli.private_services.process import end, wait_until
from micronova.clients.identity.catalog import Catalog
from micronova.clients.identity.client import IdentityClient, ServiceToken
from micronova.http.auth import KeystoneTokens
from micronova.http.client import Answer, ASGITransport, HTTPTransport, Transport
from micronova.objects.clock import SystemClock
from micronova.objects.context import RequestContext
from micronova.objects.errors import Unauthorized, Unavailable
from tests.ec2 import version_2, version_4
from tests.peers import peer
from tests.services.process import free_port
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


async def test_access_rules_of_a_token_are_enforced(world: World, identity: IdentityClient) -> None:
    """Keystone shows a token with access rules only to who says that it enforces them."""
    rules = [{"service": "compute", "method": "GET", "path": "/v2.1/servers"}]
    path, token = f"/users/{world.user['id']}/application_credentials", await world.login()
    fields = {"name": "ruled", "secret": "s", "access_rules": rules}
    credential = await made(world.client, token, path, "application_credential", **fields)
    answer = await world.client.request("POST", "/auth/tokens", by_credential(id=credential["id"], secret="s"))
    caller = await KeystoneTokens(identity, NOW).authenticate(answer.headers["x-subject-token"], CONTEXT)
    assert caller.access_rules == (("compute", "GET", "/v2.1/servers"),)


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
    tokens = KeystoneTokens(identity, NOW, cache_seconds=0)
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


def trust(**fields: Any) -> dict[str, Any]:
    parties = {"trustor_user_id": "{u}", "trustee_user_id": "{u}", "project_id": "{p}", "impersonation": True}
    return {"trust": {**parties, **fields}}


def in_trust(trust_id: str) -> dict[str, Any]:
    user = {"id": "{u}", "password": "secret"}
    identity = {"methods": ["password"], "password": {"user": user}}
    return {"auth": {"identity": identity, "scope": {"OS-TRUST:trust": {"id": trust_id}}}}


AGAIN = {"allow_redelegation": True}
FIRST, SECOND, LATER, LAST = (f"{year}-01-01T00:00:00.000000Z" for year in (2098, 2099, 2100, 2101))


def ruled(*rules: dict[str, Any], name: str = "ruled") -> dict[str, Any]:
    return {"application_credential": {"name": name, "secret": "s", "access_rules": list(rules)}}


SHOW = {"service": "identity", "method": "GET", "path": "/v3/users/*"}


def limited(kind: str, **fields: Any) -> dict[str, Any]:
    amount = "default_limit" if kind == "registered_limits" else "resource_limit"
    return {kind: [{"service_id": "{s}", "resource_name": "things", amount: 10, **fields}]}


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
    ("user", "GET", "/users/{u}/access_rules", None, ""),
    ("user", "POST", "/users/{u}/application_credentials", ruled({**SHOW, "method": "zork"}), ""),
    ("user", "POST", "/users/{u}/application_credentials", ruled({**SHOW, "path": "v3"}), ""),
    ("user", "POST", "/users/{u}/application_credentials", ruled({**SHOW, "service": "a/b"}), ""),
    ("user", "POST", "/users/{u}/application_credentials", ruled(SHOW), "ac"),
    ("user", "GET", "/users/{u}/application_credentials/{ac}", None, ""),
    ("user", "GET", "/users/{u}/access_rules?service=identity", None, "ar"),
    ("user", "GET", "/users/{u}/access_rules?method=PUT", None, ""),
    ("user", "GET", "/users/{u}/access_rules/{ar}", None, ""),
    ("user", "GET", "/users/{u}/access_rules/nothing", None, ""),
    ("admin", "GET", "/users/{u}/access_rules", None, ""),
    ("admin", "DELETE", "/users/{u}/access_rules/{ar}", None, ""),
    ("user", "POST", "/users/{u}/application_credentials", ruled({"id": "{ar}"}, name="again"), "again"),
    ("nobody", "POST", "/auth/tokens", by_credential(id="{ac}", secret="s"), ""),
    ("by {ac}", "GET", "/users/{u}", None, ""),
    ("by {ac}", "HEAD", "/users/{u}", None, ""),
    ("by {ac}", "GET", "/users/{u}/projects", None, ""),
    ("by {ac}", "GET", "/auth/catalog", None, ""),
    ("by {ac}", "POST", "/users/{u}/application_credentials", ruled(name="more"), ""),
    ("user", "DELETE", "/users/{u}/access_rules/{ar}", None, ""),
    ("user", "DELETE", "/users/{u}/application_credentials/{again}", None, ""),
    ("user", "DELETE", "/users/{u}/application_credentials/{ac}", None, ""),
    ("user", "DELETE", "/users/{u}/access_rules/{ar}", None, ""),
    ("user", "DELETE", "/users/{u}/access_rules/{ar}", None, ""),
    ("user", "POST", "/credentials", {"credential": {"type": "cert", "blob": "x", "user_id": "{u}"}}, "kept"),
    ("user", "GET", "/credentials", None, ""),
    ("user", "GET", "/credentials/{kept}", None, ""),
    ("user", "PATCH", "/credentials/{kept}", {"credential": {"blob": "y"}}, ""),
    ("user", "GET", "/credentials/nothing", None, ""),
    ("admin", "GET", "/credentials/nothing", None, ""),
    ("admin", "GET", "/credentials?user_id={u}", None, ""),
    ("user", "POST", "/credentials", {"credential": {"type": "cert", "user_id": "{u}"}}, ""),
    ("user", "POST", "/credentials", {"credential": {"type": "ec2", "blob": "x", "user_id": "{u}"}}, ""),
    ("user", "DELETE", "/credentials/{kept}", None, ""),
    ("user", "POST", "/users/{u}/credentials/OS-EC2", {"tenant_id": "{p}"}, ""),
    ("user", "POST", "/users/{u}/credentials/OS-EC2", {"tenant_id": "nothing"}, ""),
    ("user", "GET", "/users/{u}/credentials/OS-EC2", None, ""),
    ("user", "GET", "/users/{u}/credentials/OS-EC2/nothing", None, ""),
    ("user", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}]), "t"),
    ("user", "POST", "/OS-TRUST/trusts", trust(roles=[]), ""),
    ("user", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "nothing"}]), ""),
    ("user", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{root}"}]), ""),
    ("user", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}], expires_at="bad.123Z"), ""),
    ("user", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}], expires_at="2001-01-01T00:00:00Z"), ""),
    ("user", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}], trustee_user_id="nobody"), ""),
    ("admin", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}]), ""),
    ("user", "GET", "/OS-TRUST/trusts/{t}", None, ""),
    ("user", "GET", "/OS-TRUST/trusts/{t}/roles", None, ""),
    ("user", "GET", "/OS-TRUST/trusts/{t}/roles/{member}", None, ""),
    ("user", "GET", "/OS-TRUST/trusts/{t}/roles/{root}", None, ""),
    ("user", "GET", "/OS-TRUST/trusts?trustor_user_id={u}", None, ""),
    ("user", "GET", "/OS-TRUST/trusts", None, ""),
    ("admin", "GET", "/OS-TRUST/trusts", None, ""),
    ("user", "GET", "/OS-TRUST/trusts/nothing", None, ""),
    ("nobody", "POST", "/auth/tokens", in_trust("{t}"), ""),
    ("nobody", "POST", "/auth/tokens", in_trust("nothing"), ""),
    ("in {t}", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}]), ""),
    ("user", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}], **AGAIN, redelegation_count=9), ""),
    ("user", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}], **AGAIN, remaining_uses=1), ""),
    ("user", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}], redelegation_count=2), ""),
    ("user", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}], **AGAIN, expires_at=LATER), "rt"),
    ("in {rt}", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{root}"}]), ""),
    ("in {rt}", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}], expires_at=LAST), ""),
    ("in {rt}", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}], **AGAIN, redelegation_count=3), ""),
    # Keystone takes trusts that differ in nothing but their origin for the same.
    ("in {rt}", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}], **AGAIN, expires_at=SECOND), "rt2"),
    ("in {rt2}", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}], expires_at=FIRST), "rt3"),
    ("in {rt3}", "POST", "/OS-TRUST/trusts", trust(roles=[{"id": "{member}"}]), ""),
    ("user", "GET", "/OS-TRUST/trusts/{rt3}", None, ""),
    ("user", "DELETE", "/OS-TRUST/trusts/{rt}", None, ""),
    ("user", "GET", "/OS-TRUST/trusts/{rt3}", None, ""),
    ("nobody", "POST", "/auth/tokens", in_trust("{rt2}"), ""),
    ("user", "DELETE", "/OS-TRUST/trusts/{t}", None, ""),
    ("user", "GET", "/OS-TRUST/trusts/{t}", None, ""),
    ("admin", "POST", "/projects", {"project": {"name": "as-domain", "is_domain": True}}, "dp"),
    ("admin", "GET", "/domains/{dp}", None, ""),
    ("admin", "DELETE", "/projects/{dp}", None, ""),
    ("admin", "PATCH", "/projects/{dp}", {"project": {"enabled": False}}, ""),
    ("admin", "DELETE", "/projects/{dp}", None, ""),
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
    ("admin", "GET", "/limits/model", None, ""),
    ("admin", "GET", "/limits", None, ""),
    ("admin", "GET", "/registered_limits", None, ""),
    ("user", "POST", "/registered_limits", limited("registered_limits"), ""),
    ("admin", "POST", "/registered_limits", {"registered_limits": []}, ""),
    ("admin", "POST", "/registered_limits", limited("registered_limits", service_id="0" * 32), ""),
    ("admin", "POST", "/registered_limits", limited("registered_limits", region_id="nowhere"), ""),
    ("admin", "POST", "/registered_limits", limited("registered_limits", default_limit=-2), ""),
    ("admin", "POST", "/registered_limits", limited("registered_limits", default_limit="1"), ""),
    ("admin", "POST", "/registered_limits", limited("registered_limits", zork=1), ""),
    ("admin", "POST", "/registered_limits", limited("registered_limits"), "rl"),
    ("admin", "POST", "/registered_limits", limited("registered_limits"), ""),
    ("admin", "POST", "/registered_limits", limited("registered_limits", region_id="RegionOne"), "rr"),
    ("user", "GET", "/registered_limits", None, ""),
    ("user", "GET", "/registered_limits/{rl}", None, ""),
    ("user", "GET", "/registered_limits/nothing", None, ""),
    ("admin", "GET", "/registered_limits?region_id=RegionOne", None, ""),
    ("admin", "GET", "/registered_limits?resource_name=nothing", None, ""),
    ("admin", "PATCH", "/registered_limits/{rl}", {"registered_limit": {"default_limit": 5, "description": None}}, ""),
    ("admin", "PATCH", "/registered_limits/{rl}", {"registered_limit": {"region_id": "RegionOne"}}, ""),
    ("admin", "PATCH", "/registered_limits/{rl}", {"registered_limit": {"service_id": "0" * 32}}, ""),
    ("admin", "PATCH", "/registered_limits/{rl}", {"registered_limit": {}}, ""),
    ("admin", "PATCH", "/registered_limits/nothing", {"registered_limit": {"default_limit": 5}}, ""),
    ("user", "PATCH", "/registered_limits/{rl}", {"registered_limit": {"default_limit": 5}}, ""),
    ("user", "POST", "/limits", limited("limits", project_id="{p}"), ""),
    ("admin", "POST", "/limits", limited("limits"), ""),
    ("admin", "POST", "/limits", limited("limits", project_id="{p}", domain_id="default"), ""),
    ("admin", "POST", "/limits", limited("limits", project_id="0" * 32), ""),
    ("admin", "POST", "/limits", limited("limits", domain_id="nowhere"), ""),
    ("admin", "POST", "/limits", limited("limits", project_id="{p}", resource_name="others"), ""),
    ("admin", "POST", "/limits", limited("limits", project_id="{p}", service_id="0" * 32), ""),
    ("admin", "POST", "/limits", limited("limits", project_id="{p}"), "l"),
    ("admin", "POST", "/limits", limited("limits", project_id="{p}"), ""),
    ("admin", "POST", "/limits", limited("limits", domain_id="default"), "dl"),
    ("user", "GET", "/limits", None, ""),
    ("user", "GET", "/limits/{l}", None, ""),
    ("user", "GET", "/limits/{dl}", None, ""),
    ("user", "GET", "/limits/nothing", None, ""),
    ("admin", "GET", "/limits/nothing", None, ""),
    ("admin", "GET", "/limits?domain_id=default&service_id={s}", None, ""),
    ("admin", "GET", "/limits?project_id={p}", None, ""),
    ("admin", "PATCH", "/limits/{l}", {"limit": {"resource_limit": 7, "description": "more"}}, ""),
    ("admin", "PATCH", "/limits/{l}", {"limit": {"project_id": "{p}"}}, ""),
    ("admin", "PATCH", "/limits/{l}", {"limit": {"resource_limit": -2}}, ""),
    ("admin", "PATCH", "/limits/nothing", {"limit": {"resource_limit": 7}}, ""),
    ("user", "PATCH", "/limits/{l}", {"limit": {"resource_limit": 7}}, ""),
    ("user", "DELETE", "/limits/{l}", None, ""),
    ("admin", "PATCH", "/registered_limits/{rl}", {"registered_limit": {"default_limit": 6}}, ""),
    ("admin", "DELETE", "/registered_limits/{rl}", None, ""),
    ("admin", "DELETE", "/limits/{dl}", None, ""),
    ("admin", "DELETE", "/limits/{l}", None, ""),
    ("admin", "DELETE", "/limits/{l}", None, ""),
    ("admin", "DELETE", "/registered_limits/{rr}", None, ""),
    ("admin", "DELETE", "/registered_limits/{rl}", None, ""),
    ("admin", "DELETE", "/registered_limits/{rl}", None, ""),
    ("admin", "DELETE", "/services/{s}", None, ""),
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
        if who.startswith("in ") and who not in tokens:
            wanted = msgspec.json.encode(in_trust(ids[who[4:-1]])).decode().replace("{u}", ids["u"])
            answer = await client.request("POST", "/auth/tokens", msgspec.json.decode(wanted))
            tokens[who] = answer.headers["x-subject-token"]
        if who.startswith("by ") and who not in tokens:
            proof = by_credential(id=ids[who[4:-1]], secret="s")
            tokens[who] = (await client.request("POST", "/auth/tokens", proof)).headers["x-subject-token"]
        text = msgspec.json.encode(body).decode()
        for name, key in ids.items():
            path, text = path.replace(f"{{{name}}}", key), text.replace(f"{{{name}}}", key)
        answer = await client.request(method, path, msgspec.json.decode(text), tokens[who])
        said = answer.json() if answer.body and answer.status < 300 else {}
        if keep:
            assert answer.status < 300, (who, method, path, answer)
            [found] = [value for key, value in said.items() if key not in ("links", "truncated")]
            ids[keep] = found[0]["id"] if isinstance(found, list) else found["id"]
        told = shape(said) | ({f"Allow: {answer.headers.get('allow') is not None}"} if answer.status == 405 else set())
        if method == "POST":  # the roles of a token or an application credential
            [*inner] = (value for value in said.values() if isinstance(value, dict) and "roles" in value)
            told |= {f"role {role['name']}" for value in inner for role in value["roles"]}
        heard.append((f"{who}: {method} {path}", answer.status, told))
    return heard


# Keystone shows whole roles in tokens for trusts only, and `extra` only of domains that are changed as projects.
SHOWN_BY_CHANCE = (".catalog[]", ".token.roles[].", ".project.extra")


async def test_ours_answers_like_keystone(real: Client, tmp_path: Path) -> None:
    theirs = await talk(real)
    async with cloud_at(sqlite_at(tmp_path)) as cloud:
        ours = await talk(Client(ASGITransport(cloud.identity.service.app)))
    differences = []
    for step, (one, two) in zip(TALK, zip(theirs, ours, strict=True), strict=True):
        (asked, status, told), (_, our_status, we_told) = one, two
        missing = {each for each in told - we_told if not each.startswith(SHOWN_BY_CHANCE)}
        if status != our_status or missing:
            differences.append((step[:3], asked, status, our_status, sorted(missing)))
    assert not differences


async def judged(client: Client) -> list[tuple[str, int, set[str]]]:
    """Ask about signatures of an EC2 credential; return what was asked, the status and the shape of the answer."""
    admin = await client.admin()
    project = await made(client, admin, "/projects", "project", name="signed")
    user = await made(client, admin, "/users", "user", name="signer", password="secret")
    found = await client.request("GET", "/roles?name=member", token=admin)
    grant = f"/projects/{project['id']}/users/{user['id']}/roles/{found.json()['roles'][0]['id']}"
    assert (await client.request("PUT", grant, token=admin)).status == 204
    own = await client.token("signer", "secret", {"project": {"id": project["id"]}})
    path = f"/users/{user['id']}/credentials/OS-EC2"
    answer = await client.request("POST", path, {"tenant_id": project["id"]}, own)
    keys = answer.json()["credential"]["access"], answer.json()["credential"]["secret"]
    two, four, query = version_2(*keys, NOW()), version_4(*keys, NOW()), version_4(*keys, NOW(), in_query=True)
    heard = []
    for what, token, signed in (
        ("version 2", admin, two),
        ("version 4", admin, four),
        ("version 4 in the query", admin, query),
        ("a wrong signature", admin, {**two, "signature": "wrong"}),
        ("another path", admin, {**four, "path": "/other"}),
        ("another body", admin, {**four, "body_hash": "0" * 64}),
        ("an old request, version 2", admin, version_2(*keys, NOW() - 3600)),
        ("an old request, version 4", admin, version_4(*keys, NOW() - 3600)),
        ("no signature", admin, {**two, "signature": ""}),
        ("no key", admin, {}),
        ("an unknown key", admin, {**two, "access": "0" * 32}),
        ("a user asks", own, two),
        ("nobody asks", None, two),
    ):
        answer = await client.request("POST", "/ec2tokens", {"credentials": signed}, token)
        heard.append((what, answer.status, shape(answer.json()) if answer.status == 200 else set()))
        if answer.status == 200:
            token = answer.headers["x-subject-token"]
            for method, url in (("GET", f"/users/{user['id']}"), ("GET", path), ("GET", "/auth/catalog")):
                used = await client.request(method, url, token=token)
                heard.append((f"{what}: {method} {url.replace(user['id'], 'ID')}", used.status, set()))
            exchange = {"auth": {"identity": {"methods": ["token"], "token": {"id": token}}}}
            used = await client.request("POST", "/auth/tokens", exchange)
            heard.append((f"{what}: exchanged", used.status, set()))
    return heard


async def test_ec2_signatures_are_judged_alike(real: Client, tmp_path: Path) -> None:
    theirs = await judged(real)
    async with cloud_at(sqlite_at(tmp_path)) as cloud:
        ours = await judged(Client(ASGITransport(cloud.identity.service.app)))
    for (what, status, told), (_, our_status, we_told) in zip(theirs, ours, strict=True):
        assert status == our_status, what
        assert not {each for each in told - we_told if not each.startswith(SHOWN_BY_CHANCE)}, what
