"""Every route of every service, called by those who may not: nobody, a stranger from another project, a reader.

The routes are those that the services declare; requests are good ones (`good_requests`), so that only who asks can be
the reason to refuse. A route that is added without telling `good_requests` how to call it, or that answers a stranger
without a line in `OPEN`, fails here.
"""

import dataclasses
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace

from micronova.http.client import Answer
from micronova.http.service import AUTHENTICATED, Route, Service
from micronova.http.tokens import TokenKey, TokenSigner, TokenVerifier
from micronova.objects.context import RequestContext
from tests.functional import good_requests as good
from tests.functional.full_cloud import FullCloud, Person, full_cloud
from tests.functional.good_requests import SECRET, C, G, K, N, Things, V

__all__ = ["full_cloud"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclasses.dataclass
class World:
    """A cloud, people, and what belongs to one of them."""

    cloud: FullCloud
    owner: Person
    reader: Person  # in the owner's project
    stranger: Person  # a member of another project
    things: Things

    async def call(self, who: Person, service: Service, route: Route) -> Answer:
        """Call a route with a good request."""
        path = good.path(service, route, self.things)
        body, headers = good.body(route, self.things), good.headers(route, self.things)
        return await who.request(route.method, path, body, headers, good.newest(route))

    @property
    def guarded(self) -> list[tuple[Service, Route]]:
        return [(service, route) for service, route in self.cloud.routes() if route.policy is not None]

    @property
    def private(self) -> set[str]:
        """What no answer to a stranger may have in it: the ids of the owner's things, and their name."""
        shared = {
            "region",
            "service",
            "endpoint",
            "extensions",
            "versions",
            "public",
            "os-hosts",
            "volume host",
            "os-quota-class-sets",
            "default-security-group-rules",
            "registered limit",
            "resource class",
            "trait",
        }
        return {SECRET, *(id for kind, id in self.things.items() if kind not in shared and len(id) > 8)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(full_cloud: FullCloud) -> AsyncIterator[World]:
    """One of everything."""
    owner = await full_cloud.person("member")
    project = await full_cloud.project_name(owner)
    yield World(
        full_cloud,
        owner=owner,
        reader=await full_cloud.person("reader", project=project),
        stranger=await full_cloud.person("member"),
        things=await good.make_things(full_cloud, owner),
    )


def name(service: Service, route: Route) -> str:
    return f"{service.name} {route.label}"


async def test_a_new_route_cannot_be_forgotten(world: World) -> None:
    compute = world.cloud.process.services["compute"]
    common: dict[str, Any] = {"handler": test_a_new_route_cannot_be_forgotten, "policy": "x"}
    with pytest.raises(good.Unknown):
        good.path(compute, Route(method="GET", path="/new-things/{id}", **common), world.things)
    with pytest.raises(good.Unknown):
        good.body(Route(method="POST", path="/new-things", body=dict, **common), world.things)


# --- nobody --------------------------------------------------------------------------------------------------------

# Routes that need no token: documents that say which versions there are, and logging in.
WITHOUT_TOKEN = {
    "identity GET /", "identity HEAD /", "identity GET /v3", "identity HEAD /v3",
    "identity POST /v3/auth/tokens", "identity POST /v3/users/{user_id}/password",
    "image versions", "image GET /versions", "image GET /versions/", "image GET /v2", "image GET /v2/", "network GET /",
    "compute GET ", "compute-versions GET ",
    *(f"compute-versions {method} /{{path:path}}" for method in ("GET", "POST", "PUT", "PATCH", "DELETE")),
    "metadata GET ", "metadata HEAD ", "placement GET ", "volume GET ", "volume-versions GET ",
}  # fmt: skip
# Routes that take no token at all: who asks is proved by a signature, which `test_metadata.py` tries to forge.
SIGNED = {f"metadata {method} /{{path:path}}" for method in ("GET", "HEAD", "POST")}


async def test_only_documents_and_logging_in_need_no_token(world: World) -> None:
    open_ = {name(service, route) for service, route in world.cloud.routes() if route.policy is None}
    assert open_ == WITHOUT_TOKEN | SIGNED
    for service, route in world.cloud.routes():
        if name(service, route) in SIGNED:
            for who in (world.cloud.anonymous, world.owner, world.cloud.admin):
                answer = await world.call(who, service, route)
                assert answer.status == 400 and SECRET not in answer.body.decode(), (name(service, route), answer)
        elif route.policy is None and route.method in ("GET", "HEAD"):
            answer = await world.call(world.cloud.anonymous, service, route)
            assert answer.status in (200, 300), (name(service, route), answer)


async def test_what_is_for_the_operator_is_not_on_the_public_port(world: World) -> None:
    for path in (
        "/metrics",
        "/status",
        "/audit",
        "/timeline?server=x",
        "/explain?server=x",
        "/dry-run",
        "/hosts",
        "/control",
        "/compute/metrics",
        "/image/metrics",
    ):
        answer = await world.cloud.admin.request("GET", path)
        # Compute answers a path above its versions with the list of them.
        assert answer.status == (300 if path.startswith("/compute/") else 404), (path, answer)


async def _bad_tokens(world: World) -> dict[str, str | None]:
    signer = TokenSigner([key := TokenKey(bytes.fromhex(world.cloud.process.keys.token_key))])
    good_one = world.owner.token or ""
    claims = TokenVerifier([key.public], world.cloud.process.embedded["identity"].verifier.revocations).verify(
        good_one, time.time()
    )
    expired = msgspec.structs.replace(claims, issued_at=time.time() - 7200, expires_at=time.time() - 1)
    forged = TokenSigner([TokenKey(TokenKey.generate())]).sign(claims)
    revoked = await world.cloud.person("member")
    path, subject = f"{K}/auth/tokens", {"x-subject-token": revoked.token or ""}
    await revoked.do("DELETE", path, headers=subject)
    return {
        "none": None, "empty": "", "garbage": "garbage", "of another form": "gAAAAABh", "forged": forged,
        "changed": good_one[:-2] + ("AA" if good_one[-2:] != "AA" else "BB"), "cut": good_one[:40],
        "expired": signer.sign(expired), "revoked": revoked.token, "very long": "mn1." + "A" * 100_000,
    }  # fmt: skip


async def test_without_a_good_token_every_route_says_401(world: World) -> None:
    for kind, token in (await _bad_tokens(world)).items():
        nobody = Person(world.cloud, token)
        for service, route in world.guarded:
            answer = await world.call(nobody, service, route)
            assert answer.status == 401, (kind, name(service, route), answer)
            assert "keystone uri=" in answer.headers["www-authenticate"].lower()
            assert SECRET not in answer.body.decode()


async def test_a_ticket_that_is_not_ours_opens_no_image(world: World) -> None:
    path = f"{G}/images/{world.things['image']}/file"
    for ticket in ("", "x", "0" * 64, f"{world.things['image']}.9999999999.{'0' * 64}"):
        answer = await world.cloud.anonymous.request("GET", f"{path}?ticket={ticket}")
        assert answer.status in (401, 403), (ticket, answer)


# --- strangers -----------------------------------------------------------------------------------------------------

# Refused to everybody, for a reason that is not who it is.
NEVER = {f"compute {route}": (400, "compute never changed bare metal nodes") for route in (
    "POST /os-baremetal-nodes", "DELETE /os-baremetal-nodes/{id}", "POST /os-baremetal-nodes/{id}/action",
)}  # fmt: skip

# Where a member of another project is answered, and why that is right.
CATALOG = "what every catalog says"
OWN = "about the caller's own project or user only"
PUBLIC = "the same for everybody"
NEW = "makes something of the caller's own"
OPEN: dict[str, tuple[int, str]] = {
    "identity GET /v3/auth/catalog": (200, CATALOG),
    "identity GET /v3/regions": (200, CATALOG),
    "identity GET /v3/regions/{region_id}": (200, CATALOG),
    "identity GET /v3/auth/projects": (200, OWN),
    "identity GET /v3/auth/domains": (200, OWN),
    "identity GET /v3/auth/system": (200, OWN),
    "identity GET /v3/limits": (200, OWN),
    "identity GET /v3/credentials": (200, OWN),
    "identity GET /v3/limits/model": (200, PUBLIC),
    "identity GET /v3/registered_limits": (200, PUBLIC),
    "identity GET /v3/registered_limits/{registered_limit_id}": (200, PUBLIC),
    "image GET /v2/schemas/{name}": (200, PUBLIC),
    "image GET /v2/schemas/metadefs/{name}": (200, PUBLIC),
    "image GET /v2/metadefs/resource_types": (200, PUBLIC),
    "image GET /v2/metadefs/namespaces": (200, OWN),
    "image GET /v2/info/import": (200, PUBLIC),
    "image GET /v2/info/stores": (200, PUBLIC),
    "image GET /v2/info/usage": (200, OWN),
    "image GET /v2/images": (200, OWN),
    "image POST /v2/images": (201, NEW),
    **{f"volume GET /{kind}": (200, OWN) for kind in (
        "volumes", "volumes/detail", "volumes/summary", "snapshots", "snapshots/detail", "backups", "backups/detail",
        "attachments", "attachments/detail", "messages", "limits", "types", "os-volume-transfer",
        "os-volume-transfer/detail",
        "volume-transfers", "volume-transfers/detail",
    )},
    **{f"volume GET /{kind}": (200, PUBLIC) for kind in ("os-availability-zone", "resource_filters", "extensions")},
    "volume POST /volumes": (202, NEW),
    "compute GET /openapi.json": (200, PUBLIC),
    "network GET /v2.0": (200, PUBLIC),
    "network GET /v2.0/extensions": (200, PUBLIC),
    "network GET /v2.0/extensions/{alias}": (200, PUBLIC),
    "network GET /v2.0/availability_zones": (200, PUBLIC),
    "network GET /v2.0/service-providers": (200, PUBLIC),
    "network GET /v2.0/default-security-group-rules": (200, PUBLIC),
    "network GET /v2.0/default-security-group-rules/{id}": (200, PUBLIC),
    "network GET /v2.0/qos/rule-types": (200, PUBLIC),
    "network GET /v2.0/qos/rule-types/{type}": (200, PUBLIC),
    "network GET /v2.0/agents": (200, "an empty list: Neutron leaves out what policy hides"),
    **{f"network GET /v2.0/{kind}": (200, OWN) for kind in (
        "networks", "subnets", "subnetpools", "ports", "security-groups", "security-group-rules", "routers",
        "rbac-policies", "trunks", "address-scopes",
        "qos/policies",
        "floatingips",
    )},
    **{f"network POST /v2.0/{kind}": (201, NEW) for kind in (
        "networks", "subnetpools", "security-groups", "routers", "address-scopes",
    )},
    "compute GET /versions/{id}": (200, PUBLIC),
    "compute GET /extensions": (200, PUBLIC),
    "compute GET /extensions/{id}": (200, PUBLIC),
    "compute GET /servers": (200, OWN),
    "compute GET /servers/detail": (200, OWN),
    "compute GET /os-volumes_boot": (200, OWN),
    "compute GET /os-volumes_boot/detail": (200, OWN),
    "compute GET /os-server-groups": (200, OWN),
    "compute POST /os-server-groups": (200, NEW),
    "compute GET /flavors": (200, PUBLIC),
    "compute GET /flavors/detail": (200, PUBLIC),
    "compute GET /os-keypairs": (200, OWN),
    "compute POST /os-keypairs": (201, NEW),
    "compute POST /os-keypairs to 2.1": (200, NEW),
    "compute GET /limits": (200, OWN),
    "compute GET /os-quota-sets/{id}/defaults": (200, PUBLIC),
    "compute GET /os-availability-zone": (200, PUBLIC),
    "compute GET /os-floating-ip-pools": (200, PUBLIC),
    **{f"compute GET /{kind}": (200, OWN) for kind in (
        "images", "images/detail", "os-networks", "os-tenant-networks", "os-floating-ips", "os-security-groups",
        "os-volumes", "os-volumes/detail", "os-snapshots", "os-snapshots/detail",
    )},
    **{f"compute POST /{kind}": (200, NEW) for kind in ("os-floating-ips", "os-security-groups", "os-volumes")},
}  # fmt: skip

# Where the refusal is not the usual one: what policy refuses in the caller's own project as well is a 403,
# somebody else's thing does not exist (404).
REFUSED: dict[str, tuple[int, str]] = {
    **NEVER,
    "compute POST /servers": (400, "the flavor in the body does not exist for it"),
    "compute POST /os-volumes_boot": (400, "the flavor in the body does not exist for it"),
    **{f"compute {route}": (403, "a project's limits: there is nothing whose existence could be hidden") for route in (
        "GET /os-quota-sets/{id}", "GET /os-quota-sets/{id}/detail", "GET /os-simple-tenant-usage/{project}",
    )},
    "placement GET /usages": (403, "as for quotas"),
    **{f"network {method} /v2.0/auto-allocated-topology/{{project}}": (403, "as for quotas")
       for method in ("GET", "DELETE")},
    **{f"network {route}": (404, "admins' business, but a policy that one cannot see is not there") for route in (
        "PUT /v2.0/qos/policies/{id}", "DELETE /v2.0/qos/policies/{id}",
        *(f"{method} /v2.0/{path}/{{id}}/tags{one}" for path in ("policies", "qos/policies") for method, one in (
            ("POST", ""), ("PUT", ""), ("DELETE", ""), ("PUT", "/{tag}"), ("DELETE", "/{tag}"),
        )),
        *(f"{method} /v2.0/qos/policies/{{id}}/{kind}_rules{one}"
          for kind in ("bandwidth_limit", "dscp_marking", "minimum_bandwidth")
          for method, one in (("POST", ""), ("PUT", "/{rule}"), ("DELETE", "/{rule}"))),
    )},
    **{f"network {route}": (404, "there are no agents") for route in (
        "GET /v2.0/agents/{id}", "PUT /v2.0/agents/{id}", "DELETE /v2.0/agents/{id}",
    )},
    **{f"compute {route}": (404, "the server is looked up before policy is asked") for route in (
        "POST /servers/{id}/action os-resetState", "POST /os-volumes_boot/{id}/action os-resetState",
        "POST /servers/{id}/action injectNetworkInfo", "POST /os-volumes_boot/{id}/action injectNetworkInfo",
        "GET /servers/{id}/diagnostics", "PUT /servers/{id}/os-volume_attachments/{volume}",
        "POST /servers/{id}/action migrate", "POST /os-volumes_boot/{id}/action migrate",
        "POST /servers/{id}/action shelveOffload", "POST /os-volumes_boot/{id}/action shelveOffload",
        "POST /servers/{id}/action evacuate", "POST /os-volumes_boot/{id}/action evacuate",
        "POST /servers/{id}/action os-migrateLive", "POST /os-volumes_boot/{id}/action os-migrateLive",
        "GET /servers/{id}/migrations", "GET /servers/{id}/migrations/{migration_id}",
        "DELETE /servers/{id}/migrations/{migration_id}",
        "POST /servers/{id}/migrations/{migration_id}/action force_complete",
    )},
    **{f"volume {route}": (404, "it is looked up before policy is asked") for route in (
        "GET /backups/{backup_id}/export_record", "GET /volumes/{volume_id}/encryption_key",
        *(f"POST /{kind}s/{{{kind}_id}}/action {action}" for kind in ("snapshot", "backup") for action in (
            "os-reset_status", "os-force_delete")),
        *(f"POST /volumes/{{volume_id}}/action {action}" for action in (
            "os-reset_status", "os-force_delete", "os-force_detach")),
    )},
    **{f"volume GET /os-quota-sets/{{project}}{rest}": (403, "a project's limits, as for compute")
       for rest in ("", "/defaults")},
    **{f"identity {verb} /v3/OS-TRUST/trusts/{{trust_id}}{rest}": (404, "to who is no party of it a trust is not there")
       for verb, rest in (("GET", ""), ("DELETE", ""), ("GET", "/roles"), ("GET", "/roles/{role_id}"))},
    **{f"image {route}": (404, "it is looked up before policy is asked") for route in (
        "POST /v2/images/{image_id}/actions/deactivate", "POST /v2/images/{image_id}/actions/reactivate",
        "PUT /v2/images/{image_id}/members/{member_id}",
    )},
    **{f"image {verb} /v2/metadefs/namespaces/{{namespace}}{rest}": (404, "a namespace is looked up before") for
       verb, rest in (
        ("PUT", ""), ("DELETE", ""), ("POST", "/resource_types"), ("DELETE", "/resource_types/{resource_type}"),
        ("POST", "/tags"), ("POST", "/tags/{tag_name}"),
        *((verb, rest) for kind, one in (("object", "objects"), ("property", "properties"), ("tag", "tags"))
          for verb, rest in (
              ("POST", f"/{one}"), ("DELETE", f"/{one}"), ("PUT", f"/{one}/{{{kind}_name}}"),
              ("DELETE", f"/{one}/{{{kind}_name}}"),
          )),
    )},
}  # fmt: skip


def label(service: Service, route: Route) -> str:
    """As `name`, but old versions of a route that has newer ones are told apart."""
    text = name(service, route)
    with_version = f"{text} to 2.{route.versions.until}"
    return with_version if with_version in OPEN else text


CALLER = RequestContext(
    request_id="", user_id="u", project_id="p", roles=("member", "reader"), user_domain_id="default"
)


def expected(world: World, service: Service, route: Route) -> int:
    if good.is_removed(route):
        return 410
    text = label(service, route)
    text = text.replace(" HEAD ", " GET ") if service.name == "identity" else text
    known = OPEN.get(text) or REFUSED.get(text)
    if known:
        return known[0]
    if service.name == "identity":
        return 403  # Keystone does not say whether what one may not see exists
    return 404 if not route.policy or service.policy.allows(route.policy, CALLER, None) else 403


async def test_strangers_get_no_data_and_change_nothing(world: World) -> None:
    wrong = []
    for service, route in world.guarded:
        answer = await world.call(world.stranger, service, route)
        wanted = expected(world, service, route)
        if answer.status != wanted:
            wrong.append(f"{name(service, route)}: {answer.status}, not {wanted}: {answer.body[:200]!r}")
        if answer.status < 400:
            asked = good.path(service, route, world.things)  # what the stranger wrote itself may come back
            leaked = [word for word in world.private if word in answer.body.decode() and word not in asked]
            assert not leaked, (name(service, route), leaked)
    assert not wrong, "\n".join(wrong)
    await _everything_is_as_it_was(world)


async def _everything_is_as_it_was(world: World) -> None:
    """The owner, or an admin, still finds every single thing."""
    for service, route in world.guarded:
        if route.method != "GET" or good.is_removed(route):
            continue
        for who in (world.owner, world.cloud.admin):
            answer = await world.call(who, service, route)
            if answer.status < 300:
                break
        else:
            assert name(service, route) in NOT_EVEN_ADMINS, (name(service, route), answer)


# What nobody can be shown.
NOT_EVEN_ADMINS = {
    "network GET /v2.0/agents/{id}",  # there are none
    "compute GET /os-hosts/{id}/startup",  # nor can any host be started, shut down, rebooted
    "compute GET /os-hosts/{id}/shutdown",
    "compute GET /os-hosts/{id}/reboot",
    "compute GET /servers/{id}/os-volume_attachments/{volume}",  # the server has no volume
    "compute GET /servers/{id}/shares/{share_id}",  # nor a share
    "compute GET /os-baremetal-nodes",  # nor is there a bare metal service
    "compute GET /os-baremetal-nodes/{id}",
    "compute GET /servers/{id}/migrations/{migration_id}",  # no live migration is in progress
    "volume GET /volumes/{volume_id}/encryption_key",  # which is for compute alone
}


# --- readers -------------------------------------------------------------------------------------------------------

READERS_MAY: dict[str, tuple[int, str]] = {
    **NEVER,
    "volume POST /volumes/{volume_id}/action os-show_image_metadata": (200, "it reads"),
    "compute POST /os-keypairs": (201, "a user's own key pairs belong to no project"),
    "compute POST /os-keypairs to 2.1": (200, "a user's own key pairs belong to no project"),
    "compute DELETE /os-keypairs/{id}": (404, "it is another user's"),
    "identity DELETE /v3/OS-TRUST/trusts/{trust_id}": (404, "it is another user's"),
    "network PUT /v2.0/agents/{id}": (404, "there are no agents"),
    "network DELETE /v2.0/agents/{id}": (404, "there are no agents"),
}


async def test_readers_write_nothing(world: World) -> None:
    wrong = []
    writes = [(service, route) for service, route in world.guarded if route.method not in ("GET", "HEAD")]
    assert len(writes) > 200
    for service, route in writes:
        answer = await world.call(world.reader, service, route)
        wanted = 410 if good.is_removed(route) else READERS_MAY.get(label(service, route), (403, ""))[0]
        if answer.status != wanted:
            wrong.append(f"{name(service, route)}: {answer.status}, not {wanted}: {answer.body[:200]!r}")
    assert not wrong, "\n".join(wrong)
    await _everything_is_as_it_was(world)


async def test_a_token_for_no_project_is_good_for_its_user_only(world: World) -> None:
    body = {"auth": {"identity": {"methods": ["token"], "token": {"id": world.stranger.token}}, "scope": "unscoped"}}
    answer = await world.cloud.anonymous.request("POST", f"{K}/auth/tokens", body)
    unscoped = Person(world.cloud, answer.headers["x-subject-token"])
    for service, route in world.guarded:
        answer = await world.call(unscoped, service, route)
        if answer.status < 400:
            assert label(service, route).replace(" HEAD ", " GET ") in OPEN, (name(service, route), answer)
            assert route.method in ("GET", "HEAD") or route.path == "/os-keypairs", (name(service, route), answer)
            assert service.name != "volume" or OPEN[label(service, route)][1] == PUBLIC, (name(service, route), answer)
            assert SECRET not in answer.body.decode()
        else:
            assert answer.status in (400, 401, 403, 404, 410), (name(service, route), answer)


# --- the users of services ------------------------------------------------------------------------------------------

# What the role `service` is for, besides what everybody may: compute connects volumes of all projects, and deletes
# those that go with their server, and snapshots of images that were not made; it has images written to volumes that
# are rebuilt; the network and volume services tell compute what happens to ports and volumes
# of servers.
SERVICES_MAY = {
    *(f"volume GET /{path}" for path in ("volumes", "volumes/detail", "volumes/summary", "volumes/{volume_id}")),
    *(f"volume GET /volumes/{{volume_id}}/encryption{rest}" for rest in ("", "/{key}", "_key")),
    "volume GET /attachments", "volume GET /attachments/detail", "volume DELETE /volumes/{volume_id}",
    *(f"volume POST /volumes/{{volume_id}}/action os-{action}" for action in (
        "reserve", "unreserve", "begin_detaching", "roll_detaching", "attach", "detach", "initialize_connection",
        "terminate_connection", "reimage",
    )),
    *(f"volume GET /snapshots{rest}" for rest in ("", "/detail", "/{snapshot_id}")),
    "volume DELETE /snapshots/{snapshot_id}",
    "volume POST /attachments", "volume POST /attachments/{attachment_id}/action os-complete",
    *(f"volume {method} /attachments/{{attachment_id}}" for method in ("GET", "PUT", "DELETE")),
    "volume POST /snapshots/{snapshot_id}/action os-update_snapshot_status",
    "compute POST /os-server-external-events",
    "compute POST /os-assisted-volume-snapshots", "compute DELETE /os-assisted-volume-snapshots/{id}",
    "image GET /v2/info/stores/detail",
}  # fmt: skip
_OF_EVERYBODY = ("compute GET /os-keypairs", "compute POST /os-keypairs", "compute GET /limits", "image GET /v2/info/")


async def test_the_user_of_a_service_does_what_services_have_to_and_nothing_else(world: World) -> None:
    caller = await world.cloud.person("service")
    wrong, refused = [], 0
    for service, route in world.guarded:
        text = label(service, route)
        if service.name not in ("volume", "compute", "image"):
            continue
        if text in SERVICES_MAY:
            allowed = service.policy.allows(
                route.policy or "", replace(CALLER, roles=("service",)), {"project_id": "x"}
            )
            if not allowed:
                wrong.append(f"{text}: {route.policy} does not let services do it")
            continue
        answer = await world.call(caller, service, route)
        public = text in OPEN and (OPEN[text][1] == PUBLIC or text.startswith(_OF_EVERYBODY))
        if answer.status not in ((OPEN[text][0], 403) if public else (400, 403, 404, 410)):
            wrong.append(f"{text}: {answer.status}: {answer.body[:200]!r}")
        refused += answer.status in (403, 404)
        asked = good.path(service, route, world.things)
        leaked = [word for word in world.private if word in answer.body.decode() and word not in asked]
        assert not leaked, (text, leaked)
    assert not wrong, "\n".join(wrong)
    assert refused > 200
    await _everything_is_as_it_was(world)


# --- tokens with access rules ---------------------------------------------------------------------------------------


def rule(service: str, method: str, path: str) -> dict[str, str]:
    return {"service": service, "method": method, "path": path}


async def test_a_token_with_access_rules_does_what_they_allow_and_nothing_else(world: World) -> None:
    owner = world.owner
    rules = [
        rule("compute", "GET", "/v2.1/servers"), rule("compute", "GET", "/compute/v2.1/servers/{id}"),
        rule("compute", "POST", "/v2.1/servers"), rule("compute", "GET", f"/v2.1/{owner.project_id}/flavors"),
        rule("image", "GET", "/v2/images/*/members"), rule("network", "GET", "/v2.0/networks/**"),
        rule("identity", "GET", "/v3/regions"),
        rule("block-storage", "GET", "/v3/volumes/*"), rule("volumev3", "GET", "/volume/v3/snapshots/{id}"),
        rule("volume", "GET", "/v3/types"), rule("block-storage", "POST", f"/v3/{owner.project_id}/volumes"),
    ]  # fmt: skip
    credentials = f"{K}/users/{owner.user_id}/application_credentials"
    made = await owner.make(credentials, "application_credential", name=uuid.uuid4().hex, access_rules=rules)
    proof = {"id": made["id"], "secret": made["secret"]}
    body = {"auth": {"identity": {"methods": ["application_credential"], "application_credential": proof}}}
    answer = await world.cloud.anonymous.request("POST", f"{K}/auth/tokens", body)
    caller = Person(world.cloud, answer.headers["x-subject-token"], owner.user_id, owner.project_id)
    allowed = {
        "compute GET /servers", "compute GET /servers/{id}", "compute GET /servers/detail",
        "image GET /v2/images/{image_id}/members", "network GET /v2.0/networks/{id}", "identity GET /v3/regions",
        "network GET /v2.0/networks/{id}/tags", "network GET /v2.0/networks/{id}/tags/{tag}",
        "volume GET /volumes/{volume_id}", "volume GET /volumes/detail", "volume GET /volumes/summary",
        "volume GET /snapshots/{snapshot_id}", "volume GET /snapshots/detail",
    }  # fmt: skip
    wrong, answered = [], set()
    for service, route in world.guarded:
        if name(service, route) == "compute POST /servers":
            continue
        answer = await world.call(caller, service, route)
        if name(service, route) in allowed:
            answered.add(name(service, route))
        if (answer.status >= 300) if name(service, route) in allowed else (answer.status != 401):
            wrong.append(f"{name(service, route)}: {answer.status}: {answer.body[:200]!r}")
    assert not wrong, "\n".join(wrong)
    assert answered == allowed
    # A path is compared as the client writes it.
    assert (await caller.request("GET", f"/compute/v2.1/{owner.project_id}/flavors")).status == 200
    for path in ("/compute/v2.1/flavors", "/compute/v2/servers", f"/compute/v2.1/{owner.project_id}/servers"):
        assert (await caller.request("GET", path)).status == 401, path
    # What compute and the volume service ask other services for, in the user's name, needs no rules.
    image = world.things["image"]
    copy = {"volume": {"size": 1, "imageRef": image}}
    assert (await caller.request("POST", "/volume/v3/volumes", copy)).status == 401
    volume = (await caller.do("POST", f"/volume/v3/{owner.project_id}/volumes", copy))["volume"]["id"]
    await world.cloud.admin.do("POST", f"{V}/volumes/{volume}/action", {"os-force_delete": {}})
    new = {"server": {"name": "ruled", "flavorRef": "1", "imageRef": image, "networks": "none"}}
    server = (await caller.do("POST", f"{C}/servers", new))["server"]["id"]
    assert (await caller.request("DELETE", f"{C}/servers/{server}")).status == 401
    await owner.do("DELETE", f"{C}/servers/{server}")

    async def gone() -> bool | None:
        return True if (await owner.request("GET", f"{C}/servers/{server}")).status == 404 else None

    await world.cloud.until(gone, "the server to be gone")
    await owner.do("DELETE", f"{credentials}/{made['id']}")
    await _everything_is_as_it_was(world)


# --- tokens for a domain or for the system --------------------------------------------------------------------------

SYSTEM = {"system": {"all": True}}
ABOUT_PROJECTS = ("compute", "network", "image", "volume")  # these services take tokens for a project only


@pytest.mark.parametrize("who", ["domain admin", "another domain's admin", "system admin", "system reader"])
async def test_all_services_but_identity_take_tokens_for_a_project_only(world: World, who: str) -> None:
    other = await world.cloud.admin.make(f"{K}/domains", "domain", name=f"domain-{uuid.uuid4().hex[:8]}")
    caller = await {
        "domain admin": lambda: world.cloud.scoped("admin", {"domain": {"id": "default"}}),  # the owner's domain
        "another domain's admin": lambda: world.cloud.scoped("admin", {"domain": {"id": other["id"]}}),
        "system admin": lambda: world.cloud.scoped("admin", SYSTEM),
        "system reader": lambda: world.cloud.scoped("reader", SYSTEM),
    }[who]()
    wrong, asked = [], 0
    for service, route in world.guarded:
        if service.name not in ABOUT_PROJECTS:
            continue
        answer = await world.call(caller, service, route)
        wanted = {403}
        if good.is_removed(route):
            wanted = {410}
        elif name(service, route) in NEVER:
            wanted = {400}
        elif service.name == "compute" and route.path.startswith("/images"):
            wanted = {403}  # the image service refuses it
        elif route.policy in (AUTHENTICATED, "default"):  # documents and flavors: a private flavor is not there
            wanted = {OPEN[label(service, route)][0]} if label(service, route) in OPEN else {404}
        if answer.status not in wanted:
            wrong.append(f"{name(service, route)}: {answer.status}, not {wanted}: {answer.body[:200]!r}")
        asked_for = good.path(service, route, world.things)
        leaked = [word for word in world.private if word in answer.body.decode() and word not in asked_for]
        assert not leaked, (name(service, route), leaked)
        asked += 1
    assert not wrong, "\n".join(wrong)
    assert asked > 200
    await _everything_is_as_it_was(world)


async def test_an_admin_of_another_domain_gets_nothing_from_identity(world: World) -> None:
    other = await world.cloud.admin.make(f"{K}/domains", "domain", name=f"domain-{uuid.uuid4().hex[:8]}")
    caller = await world.cloud.scoped("admin", {"domain": {"id": other["id"]}})
    wrong = []
    for service, route in world.guarded:
        if service.name != "identity":
            continue
        answer = await world.call(caller, service, route)
        known = label(service, route).replace(" HEAD ", " GET ")
        may = known in OPEN or route.policy in DOMAIN_ADMINS_MAY
        if (answer.status != REFUSED.get(known, (403, ""))[0]) if not may else answer.status >= 400:
            wrong.append(f"{name(service, route)}: {answer.status}: {answer.body[:200]!r}")
        asked_for = good.path(service, route, world.things)
        leaked = [word for word in world.private if word in answer.body.decode() and word not in asked_for]
        if leaked and route.policy not in ("identity:get_role", "identity:list_roles"):
            wrong.append(f"{name(service, route)} leaks {leaked}")
    assert not wrong, "\n".join(wrong)
    await _everything_is_as_it_was(world)


# New things in the domain itself, lists of what it has, and the roles, which are the same for all domains.
DOMAIN_ADMINS_MAY = {
    "identity:create_group",
    "identity:create_project",
    "identity:create_user",
    "identity:get_role",
    "identity:list_roles",
    "identity:list_domains",
    "identity:list_projects",
    "identity:list_users",
    "identity:list_groups",
    "identity:list_role_assignments",
}


async def test_a_system_reader_reads_identity_and_changes_nothing(world: World) -> None:
    caller = await world.cloud.scoped("reader", SYSTEM)
    wrong = []
    for service, route in world.guarded:
        if service.name != "identity":
            continue
        answer = await world.call(caller, service, route)
        readable = route.method in ("GET", "HEAD") and route.policy != "identity:list_revoke_events"
        if answer.status not in ((200, 204) if readable else (403,)):
            wrong.append(f"{name(service, route)}: {answer.status}: {answer.body[:200]!r}")
    assert not wrong, "\n".join(wrong)
    await _everything_is_as_it_was(world)


# --- other people's things inside one's own requests ---------------------------------------------------------------


def server(**fields: Any) -> dict[str, Any]:
    return {"server": {"name": "x", "flavorRef": "1", "imageRef": "{test-image}", "networks": "none", **fields}}


# A stranger's request that names one thing of the owner's ({kind}), and the status that OpenStack gives.
BORROWED: list[tuple[str, str, Any, int]] = [
    ("POST", f"{C}/servers", server(imageRef="{image}"), 400),
    ("POST", f"{C}/servers", server(flavorRef="{flavors}"), 400),
    ("POST", f"{C}/servers", server(networks=[{"uuid": "{networks}"}]), 400),
    ("POST", f"{C}/servers", server(networks=[{"port": "{ports}"}]), 400),
    ("POST", f"{C}/servers", server(key_name=SECRET), 400),
    ("POST", f"{C}/servers", server(
        networks=[{"uuid": "{own network}"}], security_groups=[{"name": "{security-groups}"}]), 400),
    ("POST", f"{C}/servers", {**server(), "os:scheduler_hints": {"group": "{os-server-groups}"}}, 400),
    ("POST", f"{C}/servers", server(availability_zone="nova:fake-1"), 403),
    ("POST", f"{C}/servers", server(host="fake-1"), 403),
    ("GET", f"{C}/servers?all_tenants=1", None, 403),
    ("GET", f"{C}/servers/detail?all_tenants=true", None, 403),
    ("GET", f"{C}/limits?tenant_id={{project}}", None, 403),
    ("GET", f"{C}/os-keypairs?user_id={{user}}", None, 403),
    ("GET", f"{C}/os-keypairs/{SECRET}?user_id={{user}}", None, 403),
    ("DELETE", f"{C}/os-keypairs/{SECRET}?user_id={{user}}", None, 403),
    ("POST", f"{C}/os-keypairs", {"keypair": {
        "name": "k", "public_key": good.KEY, "type": "ssh", "user_id": "{user}"}}, 403),
    ("GET", "/compute/v2.1/{project}/servers", None, 400),
    ("GET", "/volume/v3/{project}/volumes", None, 400),
    ("POST", f"{V}/volumes", {"volume": {"source_volid": "{volume}"}}, 404),
    ("POST", f"{V}/volumes", {"volume": {"snapshot_id": "{volume snapshot}"}}, 404),
    ("POST", f"{V}/volumes", {"volume": {"size": 1, "imageRef": "{image}"}}, 400),
    ("POST", f"{V}/snapshots", {"snapshot": {"volume_id": "{volume}"}}, 404),
    ("POST", f"{V}/backups", {"backup": {"volume_id": "{volume}"}}, 404),
    ("POST", f"{V}/volumes", {"volume": {"backup_id": "{backup}"}}, 404),
    ("POST", f"{V}/attachments", {"attachment": {"volume_uuid": "{volume}"}}, 404),
    ("POST", f"{V}/backups", {"backup": {"volume_id": "{own volume}", "snapshot_id": "{volume snapshot}"}}, 404),
    ("POST", f"{V}/backups/{{own backup}}/restore", {"restore": {"volume_id": "{volume}"}}, 404),
    ("POST", f"{V}/volumes/{{own volume}}/action", {"revert": {"snapshot_id": "{volume snapshot}"}}, 400),
    ("POST", f"{V}/volumes/{{own volume}}/action", {
        "os-retype": {"new_type": "{volume type}", "migration_policy": "never"}}, 400),
    ("POST", f"{V}/volumes/{{own volume}}/action", {
        "os-volume_upload_image": {"image_name": "x", "visibility": "public"}}, 403),
    ("POST", f"{V}/volume-transfers/{{transfer}}/accept", {"accept": {"auth_key": "x"}}, 404),
    ("GET", f"{V}/types/{{volume type}}/extra_specs", None, 404),
    ("GET", f"{V}/os-quota-sets/{{project}}?usage=true", None, 403),
    ("POST", f"{V}/volume-transfers", {"transfer": {"volume_id": "{volume}"}}, 404),
    ("POST", f"{V}/volumes", {"volume": {"size": 1, "volume_type": "{volume type}"}}, 404),
    ("GET", "/compute/v2/{project}/servers/{servers}", None, 400),
    ("POST", f"{N}/subnets", {"subnet": {"network_id": "{networks}", "cidr": "10.1.0.0/24", "ip_version": 4}}, 404),
    ("POST", f"{N}/subnets", {"subnet": {
        "network_id": "{own network}", "subnetpool_id": "{subnetpools}", "ip_version": 4}}, 404),
    ("POST", f"{N}/ports", {"port": {"network_id": "{networks}"}}, 404),
    ("POST", f"{N}/ports", {"port": {"network_id": "{own network}", "security_groups": ["{security-groups}"]}}, 404),
    ("POST", f"{N}/ports", {"port": {"network_id": "{own network}", "fixed_ips": [{"subnet_id": "{subnets}"}]}}, 400),
    ("POST", f"{N}/ports", {"port": {"network_id": "{own network}", "tenant_id": "{project}"}}, 400),
    ("POST", f"{N}/networks", {"network": {"project_id": "{project}"}}, 400),
    ("POST", f"{N}/networks", {"network": {"shared": True}}, 403),
    ("POST", f"{N}/routers", {"router": {"external_gateway_info": {"network_id": "{networks}"}}}, 404),
    ("PUT", f"{N}/routers/{{own router}}/add_router_interface", {"subnet_id": "{subnets}"}, 404),
    ("PUT", f"{N}/routers/{{own router}}/add_router_interface", {"port_id": "{ports}"}, 404),
    ("POST", f"{N}/floatingips", {"floatingip": {"floating_network_id": "{public}", "port_id": "{ports}"}}, 404),
    ("POST", f"{N}/floatingips", {"floatingip": {"floating_network_id": "{networks}"}}, 404),
    ("POST", f"{N}/security-group-rules", {"security_group_rule": {
        "security_group_id": "{own group}", "direction": "ingress", "remote_group_id": "{security-groups}"}}, 404),
    ("POST", f"{N}/security-group-rules", {"security_group_rule": {
        "security_group_id": "{security-groups}", "direction": "ingress"}}, 404),
    ("POST", f"{G}/images", {"name": "x", "owner": "{project}"}, 403),
    ("POST", f"{G}/images", {"name": "x", "visibility": "public"}, 403),
    ("POST", f"{G}/images", {"id": "{image}"}, 409),
    ("POST", f"{K}/users/{{me}}/application_credentials", {
        "application_credential": {"name": "x", "roles": [{"id": "{role}"}]}}, 400),
    ("POST", f"{K}/auth/tokens", {"auth": {"identity": {"methods": ["token"], "token": {"id": "{my token}"}},
                                  "scope": {"project": {"id": "{project}"}}}}, 401),
    ("POST", f"{K}/auth/tokens", {"auth": {"identity": {"methods": ["token"], "token": {"id": "{my token}"}},
                                  "scope": {"system": {"all": True}}}}, 401),
]  # fmt: skip

# Lists that name the owner in a filter: they are about the caller's own things all the same.
FILTERED = [
    f"{C}/servers?project_id={{project}}", f"{C}/servers/detail?tenant_id={{project}}", f"{C}/servers?user_id={{user}}",
    f"{C}/servers?ip=10.7", f"{C}/servers?uuid={{servers}}", f"{C}/os-server-groups?all_projects=True",
    f"{N}/networks?project_id={{project}}", f"{N}/networks?id={{networks}}", f"{N}/ports?device_id={{servers}}",
    f"{N}/subnets?network_id={{networks}}", f"{N}/security-groups?tenant_id={{project}}", f"{N}/routers?name={SECRET}",
    f"{N}/security-group-rules?security_group_id={{security-groups}}", f"{N}/floatingips?tenant_id={{project}}",
    f"{G}/images?owner={{project}}", f"{G}/images?name={SECRET}", f"{G}/images?id=in:{{image}}",
    f"{G}/images?visibility=all&member_status=all&tag={SECRET}", f"{G}/images?visibility=private",
    *(f"{V}/{kind}?all_tenants=1" for kind in (
        "volumes", "volumes/detail", "volumes/summary", "snapshots", "snapshots/detail", "backups", "backups/detail",
        "attachments", "attachments/detail", "volume-transfers", "volume-transfers/detail", "messages",
    )),
    f"{V}/volumes/detail?name={SECRET}", f"{V}/volumes?metadata=%7B'{SECRET}':'{SECRET}'%7D",
    f"{V}/volumes/summary?name={SECRET}", f"{V}/snapshots?volume_id={{volume}}", f"{V}/snapshots/detail?name={SECRET}",
    f"{V}/backups?volume_id={{volume}}", f"{V}/backups/detail?name={SECRET}", f"{V}/types?is_public=None",
    f"{V}/messages?resource_type=VOLUME", f"{V}/attachments?volume_id={{volume}}",
]  # fmt: skip


def _filled(value: Any, known: Things) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, known) for item in value]
    if not isinstance(value, str):
        return value
    for kind, id in known.items():
        value = value.replace(f"{{{kind}}}", id)
    assert "{" not in value, value
    return value


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def known(world: World) -> Things:
    """The owner's things, and some of the stranger's own."""
    me = world.stranger
    network = await me.make(f"{N}/networks", "network", name="mine")
    await me.make(f"{N}/subnets", "subnet", network_id=network["id"], cidr="10.1.0.0/24", ip_version=4)
    volume = await me.make(f"{V}/volumes", "volume", name="mine", size=1)
    await good.until_available(world.cloud, me, f"volumes/{volume['id']}", "volume")
    backup = await me.make(f"{V}/backups", "backup", volume_id=volume["id"], name="mine")
    await good.until_available(world.cloud, me, f"backups/{backup['id']}", "backup")
    return {
        **world.things,
        "own volume": volume["id"],
        "own backup": backup["id"],
        "own network": network["id"],
        "own router": (await me.make(f"{N}/routers", "router", name="mine"))["id"],
        "own group": (await me.make(f"{N}/security-groups", "security_group", name="mine"))["id"],
        "test-image": (await me.do("GET", f"{G}/images?name=test-image"))["images"][0]["id"],
        "me": me.user_id,
        "my token": me.token or "",
    }


@pytest.mark.parametrize("case", BORROWED, ids=lambda case: f"{case[0]} {case[1]} {case[2]}"[:100])
async def test_nobody_can_use_what_belongs_to_others(
    world: World, known: Things, case: tuple[str, str, Any, int]
) -> None:
    method, path, body, status = case
    answer = await world.stranger.request(method, _filled(path, known), _filled(body, known))
    assert answer.status == status, answer
    assert "10.7.0" not in answer.body.decode()


@pytest.mark.parametrize("path", FILTERED)
async def test_filters_find_nothing_of_others(world: World, known: Things, path: str) -> None:
    answer = await world.stranger.request("GET", _filled(path, known))
    assert answer.status == 200, answer
    body = answer.body.decode()
    asked = _filled(path, known)
    assert not [word for word in world.private if word in body and word not in asked]
    assert world.things["servers"] not in body.replace(asked, "")
    found = msgspec.json.decode(answer.body)
    for items in found.values():
        if isinstance(items, list):
            assert all(SECRET not in str(item) for item in items), items
    if "volume-summary" in found:
        own = await world.stranger.do("GET", f"{V}/volumes/summary")
        assert found["volume-summary"]["total_count"] <= own["volume-summary"]["total_count"], found


# --- and those who may ---------------------------------------------------------------------------------------------

# What even an admin cannot do here, for a reason that is not who it is.
BY_NATURE = {
    "volume POST /snapshots/{snapshot_id}/action os-update_snapshot_status": 400,  # it is not being made
    "volume POST /backups/import_record": 400,  # the record would have to name a file
    "volume POST /types/{type_id}/encryption": 400,  # the type has one already
    # A volume is attached, detached, extended and so on one after the other.
    **{
        f"volume POST /volumes/{{volume_id}}/action {action}": 400
        for action in (
            "os-update_readonly_flag",
            "os-begin_detaching",
            "os-reserve",
            "os-attach",
            "os-detach",
            "os-retype",
            "revert",
            "os-reimage",
            "os-volume_upload_image",
            "os-force_delete",
        )
    },
    **{
        f"volume POST /{path}": 400
        for path in ("os-volume-transfer", "volume-transfers", "snapshots", "attachments", "backups")
    },
    **{
        f"volume POST /{path}/{{transfer_id}}/accept": 404  # without the key
        for path in ("os-volume-transfer", "volume-transfers")
    },
    "placement POST /reshaper": 403,  # for services alone
    "identity PUT /v3/projects/{project_id}/tags/{tag}": 400,  # it has the tag already
    "network PUT /v2.0/agents/{id}": 404,  # there are no agents
    "image POST /v2/tasks": 400,  # clients cannot create tasks
    "compute POST /os-snapshots": 400,  # the volume is reserved
    "compute POST /servers/{id}/os-volume_attachments": 404,  # there is no such volume
    "compute PUT /servers/{id}/os-volume_attachments/{volume}": 404,
    "compute POST /os-assisted-volume-snapshots": 400,  # no server has the volume
    "compute POST /servers/{id}/action os-getSPICEConsole": 400,  # simulated guests have no SPICE
    "compute POST /os-volumes_boot/{id}/action os-getSPICEConsole": 400,
    "compute POST /os-volumes_boot/{id}/action forceDelete": 404,  # it is gone by the other name already
    "compute POST /os-volumes_boot/{id}/action removeFixedIp": 400,
    "compute POST /os-volumes_boot/{id}/action removeSecurityGroup": 404,
    "compute POST /servers/{id}/action evacuate": 400,  # the host of the server is up
    "compute POST /os-volumes_boot/{id}/action evacuate": 400,
    "compute POST /servers/{id}/migrations/{migration_id}/action force_complete": 400,  # it does not run any more
    **{route: status for route, (status, _) in NEVER.items()},
}


async def test_the_requests_were_good(world: World) -> None:
    """The owner or an admin gets through with the same requests, or is told that the moment is wrong (409)."""
    bodies = [pair for pair in world.guarded if pair[1].method in ("POST", "PUT", "PATCH")]
    wrong = []
    last = ("forceDelete", "os-force_delete")
    for service, route in sorted(bodies, key=lambda pair: (pair[1].action in last, pair[1].method)):
        if good.is_removed(route):
            continue
        for who in (world.owner, world.cloud.admin):
            answer = await world.call(who, service, route)
            if answer.status < 300 or answer.status == 409:
                break
        else:
            if BY_NATURE.get(name(service, route)) != answer.status:
                wrong.append(f"{name(service, route)}: {answer.status}: {answer.body[:200]!r}")
    assert not wrong, "\n".join(wrong)
