"""For every route of every service a request that is good: whoever is refused is refused for who it is.

`make_things` makes one of each kind of thing for somebody. `path` and `body` fill a route's path and body with them;
a route for which they do not know how raises `Unknown`, so that a new route cannot be forgotten.
"""

import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from micronova.api.compute import removed
from micronova.http.service import Route, Service
from tests.ec2 import version_4
from tests.functional.full_cloud import NEWEST, FullCloud, Person

SECRET = "kept-from-strangers"  # in the name of everything that has one
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEgrr4VKlvI4YyeFL5Ej/0tBUaKhIqk5M2u6YCEXeQbD x"

C, K, G, N = "/compute/v2.1", "/identity/v3", "/image/v2", "/network/v2.0"  # as in keystone, glance
V = "/volume/v3"
P = "/placement"
TRAIT, CLASS = "CUSTOM_KEPT", "CUSTOM_KEPT"
Things = dict[str, str]
_CONSOLE = {"remote_console": {"protocol": "serial", "type": "serial"}}


class Unknown(AssertionError):
    """A route that nobody has told us about."""


async def make_things(cloud: FullCloud, owner: Person) -> Things:
    """Make one of everything; return its ids by what they are."""
    other = await cloud.admin.make(f"{K}/projects", "project", name=f"{SECRET}-other")
    made: Things = {
        "user": owner.user_id, "project": owner.project_id, "token": owner.token or "", "other project": other["id"]
    }  # fmt: skip
    made |= await _identity(cloud.admin, owner)
    made |= await _network(cloud.admin, owner)
    made |= await _image(owner)
    made |= await _volume(cloud, owner)
    made |= await _metadefs(cloud.admin, owner.project_id)
    made |= await _compute(cloud, owner, made)
    made |= await _placement(cloud.admin, owner)
    return made


async def _placement(admin: Person, owner: Person) -> Things:
    """A provider with a trait and an inventory, and a consumer that holds some of it."""
    await admin.do("PUT", f"{P}/traits/{TRAIT}")
    await admin.do("PUT", f"{P}/resource_classes/{CLASS}")
    provider = (await admin.do("POST", f"{P}/resource_providers", {"name": SECRET}))["uuid"]
    at = f"{P}/resource_providers/{provider}"
    await admin.do("POST", f"{at}/inventories", {"resource_class": CLASS, "total": 4})
    await admin.do("PUT", f"{at}/traits", {"traits": [TRAIT], "resource_provider_generation": 1})
    consumer = str(uuid.uuid4())
    body = {"allocations": {provider: {"resources": {CLASS: 1}}}, "consumer_generation": None, "consumer_type": "X"}
    await admin.do(
        "PUT", f"{P}/allocations/{consumer}", {**body, "project_id": owner.project_id, "user_id": owner.user_id}
    )
    return {"resource provider": provider, "consumer": consumer, "resource class": CLASS, "trait": TRAIT}


async def _identity(admin: Person, owner: Person) -> Things:
    credential = await owner.make(
        f"{K}/users/{owner.user_id}/application_credentials", "application_credential", name=SECRET,
        access_rules=[{"service": "compute", "method": "GET", "path": f"/{SECRET}"}],
    )  # fmt: skip
    stored = await owner.make(f"{K}/credentials", "credential", type="cert", blob=SECRET)
    ec2 = f"{K}/users/{owner.user_id}/credentials/OS-EC2"
    keys = (await owner.do("POST", ec2, {"tenant_id": owner.project_id}))["credential"]
    domain = await admin.make(f"{K}/domains", "domain", name=SECRET)
    group = await admin.make(f"{K}/groups", "group", name=SECRET)
    role = await admin.make(f"{K}/roles", "role", name=SECRET)
    implied = await admin.make(f"{K}/roles", "role", name=f"{SECRET}-implied")
    await admin.do("PUT", f"{K}/roles/{role['id']}/implies/{implied['id']}")
    await admin.do("PUT", f"{K}/projects/{owner.project_id}/tags/{SECRET}")
    await admin.do("PUT", f"{K}/groups/{group['id']}/users/{owner.user_id}")
    for actor in (f"users/{owner.user_id}", f"groups/{group['id']}"):
        await admin.do("PUT", f"{K}/system/{actor}/roles/{role['id']}")
        for place in (f"projects/{owner.project_id}", f"domains/{domain['id']}"):
            await admin.do("PUT", f"{K}/{place}/{actor}/roles/{role['id']}")
            await admin.do("PUT", f"{K}/OS-INHERIT/{place}/{actor}/roles/{role['id']}/inherited_to_projects")
    trust = await owner.make(
        f"{K}/OS-TRUST/trusts", "trust", trustor_user_id=owner.user_id, trustee_user_id=owner.user_id,
        project_id=owner.project_id, impersonation=True, roles=[{"id": role["id"]}],
    )  # fmt: skip
    region = await admin.make(f"{K}/regions", "region", id="elsewhere")
    service = await admin.make(f"{K}/services", "service", type="fortune-telling", name="fortune")
    endpoint = await admin.make(
        f"{K}/endpoints", "endpoint", service_id=service["id"], interface="internal", url="http://fortune.example.org/"
    )
    fortunes = {"service_id": service["id"], "resource_name": "fortunes"}
    defaults = [{**fortunes, "default_limit": 1}, {**fortunes, "resource_name": "omens", "default_limit": 1}]
    # The second has no limits of projects, and so it can be changed.
    _, registered = (await admin.do("POST", f"{K}/registered_limits", {"registered_limits": defaults}))[
        "registered_limits"
    ]
    own = {**fortunes, "project_id": owner.project_id, "resource_limit": 1, "description": SECRET}
    [limit] = (await admin.do("POST", f"{K}/limits", {"limits": [own]}))["limits"]
    return {
        "registered limit": registered["id"], "unified limit": limit["id"],
        "domain": domain["id"], "group": group["id"], "role": role["id"], "implied": implied["id"],
        "credential": credential["id"], "access rule": credential["access_rules"][0]["id"],
        "stored": stored["id"], "access key": keys["access"], "secret key": keys["secret"], "trust": trust["id"],
        "region": region["id"], "service": service["id"], "endpoint": endpoint["id"],
    }  # fmt: skip


async def _network(admin: Person, owner: Person) -> Things:
    networks = (await admin.do("GET", f"{N}/networks?router:external=True"))["networks"]
    network = await owner.make(f"{N}/networks", "network", name=SECRET)
    subnet = await owner.make(
        f"{N}/subnets", "subnet", name=SECRET, network_id=network["id"], cidr="10.7.0.0/24", ip_version=4
    )
    # A port of its own holds the subnet's interface: the router's is removed by the port.
    gateway = {"network_id": networks[0]["id"]}
    router = await owner.make(f"{N}/routers", "router", name=SECRET, external_gateway_info=gateway)
    interface = await owner.do("PUT", f"{N}/routers/{router['id']}/add_router_interface", {"subnet_id": subnet["id"]})
    spare = await owner.make(f"{N}/networks", "network", name=f"{SECRET}-spare")
    other = await owner.make(
        f"{N}/subnets", "subnet", name=f"{SECRET}-spare", network_id=spare["id"], cidr="10.8.0.0/24", ip_version=4
    )
    group = await owner.make(f"{N}/security-groups", "security_group", name=SECRET)
    port = await owner.make(f"{N}/ports", "port", name=SECRET, network_id=network["id"], security_groups=[group["id"]])
    pool = await owner.make(f"{N}/subnetpools", "subnetpool", name=SECRET, prefixes=["10.77.0.0/16"])
    floating = await owner.make(
        f"{N}/floatingips", "floatingip", description=SECRET, floating_network_id=networks[0]["id"]
    )
    scope = await owner.make(f"{N}/address-scopes", "address_scope", name=SECRET, ip_version=4)
    parent = await owner.make(f"{N}/ports", "port", name=f"{SECRET}-parent", network_id=network["id"])
    trunk = await owner.make(f"{N}/trunks", "trunk", name=SECRET, port_id=parent["id"])
    spares = [await owner.make(f"{N}/ports", "port", name=SECRET, network_id=spare["id"]) for _ in range(2)]
    vlan = {"port_id": spares[0]["id"], "segmentation_type": "vlan", "segmentation_id": 7}
    await owner.do("PUT", f"{N}/trunks/{trunk['id']}/add_subports", {"sub_ports": [vlan]})
    # Limits are made by admins.
    policy = await admin.make(f"{N}/qos/policies", "policy", name=SECRET, project_id=owner.project_id)
    limits = f"{N}/qos/policies/{policy['id']}/bandwidth_limit_rules"
    limit = await admin.make(limits, "bandwidth_limit_rule", max_kbps=1000)
    mark = await admin.make(f"{N}/qos/policies/{policy['id']}/dscp_marking_rules", "dscp_marking_rule", dscp_mark=26)
    least = f"{N}/qos/policies/{policy['id']}/minimum_bandwidth_rules"
    minimum = await admin.make(least, "minimum_bandwidth_rule", min_kbps=10)
    await admin.do("PUT", f"{N}/qos/policies/{policy['id']}/tags/{SECRET}")
    # It shares with nobody, because the target is no project.
    entry = await owner.make(
        f"{N}/rbac-policies", "rbac_policy", object_type="network", object_id=network["id"], action="access_as_shared",
        target_tenant=SECRET,
    )  # fmt: skip
    rules = (await owner.do("GET", f"{N}/default-security-group-rules"))["default_security_group_rules"]
    made = {
        "default-security-group-rules": rules[0]["id"],
        "address-scopes": scope["id"],
        "rbac-policies": entry["id"], "trunks": trunk["id"], "subport": vlan["port_id"], "spare port": spares[1]["id"],
        "qos": policy["id"], "policies": policy["id"], "limit": limit["id"], "mark": mark["id"],
        "minimum": minimum["id"],
        "networks": network["id"], "subnets": subnet["id"], "routers": router["id"], "security-groups": group["id"],
        "security-group-rules": group["security_group_rules"][0]["id"], "ports": port["id"], "subnetpools": pool["id"],
        "floatingips": floating["id"], "network-ip-availabilities": network["id"],
        # by their names in the compute API
        "os-networks": network["id"], "os-tenant-networks": network["id"], "os-security-groups": group["id"],
        "os-floating-ips": floating["id"], "floating ip": floating["floating_ip_address"],
        "os-security-group-rules": group["security_group_rules"][0]["id"], "os-baremetal-nodes": "nothing",
        "agents": "nothing", "agent-states": "a-host-without-guests",
        "public": networks[0]["id"], "spare subnet": other["id"], "interface": interface["port_id"],
    }  # fmt: skip
    for kind in ("networks", "subnets", "routers", "security-groups", "ports", "subnetpools", "floatingips", "trunks"):
        await owner.do("PUT", f"{N}/{kind}/{made[kind]}/tags/{SECRET}")
    return made


async def _image(owner: Person) -> Things:
    image = await owner.do(
        "POST",
        f"{G}/images",
        {"name": SECRET, "disk_format": "raw", "container_format": "bare", "tags": [SECRET], SECRET: SECRET},
    )
    path = f"{G}/images/{image['id']}"
    await owner.do("PUT", f"{path}/file", SECRET.encode(), {"content-type": "application/octet-stream"})
    await owner.do("POST", f"{path}/members", {"member": "a-friend"})
    # Uploads and imports need one that is empty.
    empty = await owner.do("POST", f"{G}/images", {"name": SECRET, "disk_format": "raw", "container_format": "bare"})
    staged = await owner.do("POST", f"{G}/images", {"name": SECRET, "disk_format": "raw", "container_format": "bare"})
    path = f"{G}/images/{staged['id']}"
    await owner.do("PUT", f"{path}/stage", SECRET.encode(), {"content-type": "application/octet-stream"})
    await owner.do("POST", f"{path}/import", {"method": {"name": "glance-direct"}})
    [task] = (await owner.do("GET", f"{path}/tasks"))["tasks"]
    return {
        "image": image["id"], "images": image["id"], "empty image": empty["id"], "member": "a-friend",
        "task": task["id"],
    }  # fmt: skip


async def _volume(cloud: FullCloud, owner: Person) -> Things:
    volume = await owner.make(f"{V}/volumes", "volume", name=SECRET, size=1, metadata={SECRET: SECRET})
    await until_available(cloud, owner, f"volumes/{volume['id']}", "volume")
    snapshot = await owner.make(f"{V}/snapshots", "snapshot", volume_id=volume["id"], name=SECRET)
    await until_available(cloud, owner, f"snapshots/{snapshot['id']}", "snapshot")
    await owner.do("POST", f"{V}/snapshots/{snapshot['id']}/metadata", {"metadata": {SECRET: SECRET}})
    attached = await owner.make(f"{V}/volumes", "volume", name=SECRET, size=1)
    await until_available(cloud, owner, f"volumes/{attached['id']}", "volume")
    # Of no server: the audit reports an attachment of a server that does not exist.
    attachment = await owner.make(f"{V}/attachments", "attachment", volume_uuid=attached["id"])
    offered = await owner.make(f"{V}/volumes", "volume", name=SECRET, size=1)
    await until_available(cloud, owner, f"volumes/{offered['id']}", "volume")
    transfer = await owner.make(f"{V}/volume-transfers", "transfer", volume_id=offered["id"], name=SECRET)
    backup = await owner.make(f"{V}/backups", "backup", volume_id=volume["id"], name=SECRET)
    await until_available(cloud, owner, f"backups/{backup['id']}", "backup")
    # A type for the owner only, with QoS specs.
    private = {"os-volume-type-access:is_public": False, "extra_specs": {SECRET: SECRET}}
    admin, name = cloud.admin, f"{SECRET}-{uuid.uuid4().hex[:8]}"
    type_ = await admin.make(f"{V}/types", "volume_type", name=name, **private)
    access = {"addProjectAccess": {"project": owner.project_id}}
    await admin.do("POST", f"{V}/types/{type_['id']}/action", access)
    specs = await admin.make(f"{V}/qos-specs", "qos_specs", name=name, total_iops_sec="100")
    encryption = {"provider": "luks", "control_location": "front-end"}
    await admin.do("POST", f"{V}/types/{type_['id']}/encryption", {"encryption": encryption})
    await admin.do("PUT", f"{V}/default-types/{owner.project_id}", {"default_type": {"volume_type": "__DEFAULT__"}})
    # A message: of a volume that no service takes.
    service = {"binary": "cinder-volume", "host": "controller@files"}
    await admin.do("PUT", f"{V}/os-services/disable", service)
    failed = await owner.make(f"{V}/volumes", "volume", name=SECRET, size=1)

    async def message() -> str | None:
        found = await owner.do("GET", f"{V}/messages?resource_uuid={failed['id']}")
        return found["messages"][0]["id"] if found["messages"] else None

    told = await cloud.until(message, "a message")
    await admin.do("PUT", f"{V}/os-services/enable", service)
    return {
        "volume": volume["id"], "volume snapshot": snapshot["id"], "attachment": attachment["id"],
        "backup": backup["id"], "transfer": transfer["id"], "volume type": type_["id"], "qos specs": specs["id"],
        "message": told, "volume host": service["host"],
    }  # fmt: skip


async def until_available(cloud: FullCloud, owner: Person, path: str, noun: str) -> None:
    """Wait until a volume, a snapshot or a backup can be used."""

    async def available() -> bool | None:
        shown = (await owner.do("GET", f"{V}/{path}"))[noun]
        assert shown["status"] != "error", shown
        return True if shown["status"] == "available" else None

    await cloud.until(available, f"the {noun} to be available")


async def _metadefs(admin: Person, project: str) -> Things:
    """A namespace of metadata definitions, which only administrators make, that belongs to the owner's project."""
    name = f"x-{uuid.uuid4().hex}"
    definition = {"title": "x", "type": "string", "description": SECRET}
    await admin.do(
        "POST",
        f"{G}/metadefs/namespaces",
        {
            "namespace": name, "owner": project, "description": SECRET, "objects": [{"name": "x"}],
            "properties": {"x": definition}, "tags": [{"name": "x"}], "resource_type_associations": [{"name": "x"}],
        },
    )  # fmt: skip
    return {"namespace": name, "definition": "x"}


async def _compute(cloud: FullCloud, owner: Person, made: Things) -> Things:
    flavor = await cloud.admin.make(
        f"{C}/flavors", "flavor", name=SECRET, ram=64, vcpus=1, disk=1, **{"os-flavor-access:is_public": False}
    )
    path = f"{C}/flavors/{flavor['id']}"
    await cloud.admin.do("POST", f"{path}/action", {"addTenantAccess": {"tenant": owner.project_id}})
    await cloud.admin.do("POST", f"{path}/os-extra_specs", {"extra_specs": {"hw:cpu_policy": "shared"}})
    await owner.make(f"{C}/os-keypairs", "keypair", name=SECRET, public_key=KEY, type="ssh")
    group = await owner.make(f"{C}/os-server-groups", "server_group", name=SECRET, policy="affinity")
    aggregate = await cloud.admin.make(f"{C}/os-aggregates", "aggregate", name=SECRET)
    await cloud.admin.do("POST", f"{C}/os-aggregates/{aggregate['id']}/action", {"add_host": {"host": "fake-2"}})
    services = (await cloud.admin.do("GET", f"{C}/os-services?binary=nova-compute"))["services"]
    hypervisors = (await cloud.admin.do("GET", f"{C}/os-hypervisors"))["hypervisors"]
    made = {
        **made, "flavors": flavor["id"], "os-keypairs": SECRET, "os-server-groups": group["id"],
        "os-aggregates": str(aggregate["id"]), "os-services": services[0]["id"], "os-hypervisors": hypervisors[0]["id"],
        "os-instance_usage_audit_log": "2029-12-13 14:15:16",
        "os-hosts": "fake-1", "os-quota-sets": owner.project_id, "os-quota-class-sets": "default",
        "extensions": "os-keypairs", "versions": "v2.1", "migration": "1",
        "os-volumes": made["volume"], "os-snapshots": made["volume snapshot"],
        **dict.fromkeys(("no volume", "os-assisted-volume-snapshots"), str(uuid.uuid4())),
    }  # fmt: skip
    port = await owner.make(f"{N}/ports", "port", name=SECRET, network_id=made["networks"])
    server = await owner.make(
        f"{C}/servers", "server", name=SECRET, imageRef=made["image"], flavorRef=made["flavors"], key_name=SECRET,
        networks=[{"port": port["id"]}], metadata={SECRET: SECRET}, tags=[SECRET],
    )  # fmt: skip
    id = server["id"]

    async def active() -> bool | None:
        shown = (await owner.do("GET", f"{C}/servers/{id}"))["server"]
        assert shown["status"] != "ERROR", shown
        return True if shown["status"] == "ACTIVE" else None

    await cloud.until(active, "the server to run")
    actions = (await owner.do("GET", f"{C}/servers/{id}/os-instance-actions"))["instanceActions"]
    console = await owner.do("POST", f"{C}/servers/{id}/remote-consoles", _CONSOLE)
    made["console token"] = console["remote_console"]["url"].rpartition("=")[2]
    made |= {"servers": id, "os-volumes_boot": id, "label": SECRET, "request_id": actions[0]["request_id"]}
    made["server port"], made["fixed ip"] = port["id"], port["fixed_ips"][0]["ip_address"]
    return made


# --- paths ---------------------------------------------------------------------------------------------------------

# Parameters that mean the same wherever they stand, by service.
PARAMETERS: dict[str, dict[str, str]] = {
    "identity": {
        "domain_id": "domain", "project_id": "project", "user_id": "user", "group_id": "group", "role_id": "role",
        "implied_id": "implied", "application_credential_id": "credential", "region_id": "region",
        "service_id": "service", "endpoint_id": "endpoint", "credential_id": "stored", "access_key": "access key",
        "trust_id": "trust", "rule_id": "access rule", "registered_limit_id": "registered limit",
        "limit_id": "unified limit",
    },
    "image": {
        "image_id": "image", "member_id": "member", "task_id": "task", "namespace": "namespace",
        "resource_type": "definition", "object_name": "definition", "property_name": "definition",
        "tag_name": "definition",
    },
    "network": {"project": "project", "rule": "limit"},
    "volume": {
        "volume_id": "volume", "snapshot_id": "volume snapshot", "attachment_id": "attachment",
        "type_id": "volume type", "specs_id": "qos specs", "project": "project", "message_id": "message",
        "transfer_id": "transfer", "backup_id": "backup", "host": "volume host",
    },
    "compute": {
        "label": "label", "request_id": "request_id", "host": "os-hosts", "token": "console token",
        "port_id": "server port", "project": "project", "volume": "no volume", "migration_id": "migration",
        "share_id": "no volume",
    },
    "placement": {
        "uuid": "resource provider", "consumer_uuid": "consumer", "resource_class": "resource class", "name": "trait",
    },
}  # fmt: skip
QUERIES: dict[str, Callable[[Things], str]] = {
    **{
        f"GET /qos-specs/{{specs_id}}/{verb}": lambda t: f"?vol_type_id={t['volume type']}"
        for verb in ("associate", "disassociate")
    },
    "GET /usages": lambda t: f"?project_id={t['project']}",
    "GET /allocation_candidates": lambda t: "?resources=VCPU:1",
}
WORDS = {
    "GET /v2/schemas/{name}": "image",
    "GET /capabilities/{backend}": "controller@files",
    "GET /os-quota-class-sets/{class_name}": "default",
    "PUT /os-quota-class-sets/{class_name}": "default",
    "GET /v2/schemas/metadefs/{name}": "namespace",
    "GET /v2.0/extensions/{alias}": "router",
    "GET /v2.0/qos/rule-types/{type}": "bandwidth_limit",
    **{
        f"{method} /{{path:path}}": "openstack/latest/password"
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
    },
}


def path(service: Service, route: Route, things: Things) -> str:
    """Return the route's URL with the things' ids in it."""
    known = PARAMETERS.get(service.name, {})
    unavailable = is_removed(route)

    def fill(found: re.Match[str]) -> str:
        name = found[1]
        if name == "tag":
            return SECRET
        if route.label in WORDS:
            return WORDS[route.label]
        if unavailable:
            return "1"
        if name == "image_id" and _needs_empty_image(route):
            return things["empty image"]
        if name == "rule" and "dscp" in route.path:
            return things["mark"]
        if name == "rule" and "minimum" in route.path:
            return things["minimum"]
        if name in known:
            return things[known[name]]
        if name == "key" and "/encryption/" in route.path:
            return "encryption_key_id" if route.path.startswith("/volumes") else "provider"
        if name == "key":
            return "hw:cpu_policy" if route.path.startswith("/flavors") else SECRET
        noun = route.path.removeprefix("/v2.0").split("/")[1]
        if name == "id" and noun in things:
            return old_id(noun, newest(route)) or things[noun]
        raise Unknown(f"What does {{{name}}} mean in {service.name}'s {route.label}? Say so in {__name__}.")

    asked = QUERIES[route.label](things) if route.label in QUERIES else ""
    return service.mount + service.prefix + re.sub(r"\{(\w+)(?::\w+)?\}", fill, route.path) + asked


def old_id(noun: str, minor: int) -> str | None:
    """Before 2.53 services and hypervisors had numbers, and services were changed by a verb."""
    if minor >= 53:
        return None
    return {"os-hypervisors": "1", "os-services": "disable"}.get(noun)


def newest(route: Route) -> int:
    """Return the newest microversion at which a route exists."""
    return min(route.versions.until, NEWEST)


def is_removed(route: Route) -> bool:
    """Return whether this is one of the routes that were taken out of OpenStack, and answer 410."""
    return route.handler is removed.gone


def _needs_empty_image(route: Route) -> bool:
    return route.path.endswith(("/file", "/stage", "/import")) and route.method != "GET"


# --- bodies --------------------------------------------------------------------------------------------------------

_VOLUME_ACTIONS: dict[str, Callable[[Things], Any]] = {
    "os-extend": lambda t: {"os-extend": {"new_size": 2}},
    "os-set_bootable": lambda t: {"os-set_bootable": {"bootable": False}},
    "os-update_readonly_flag": lambda t: {"os-update_readonly_flag": {"readonly": False}},
    "os-reset_status": lambda t: {"os-reset_status": {"status": "available"}},
    "os-force_delete": lambda t: {"os-force_delete": {}},
    "os-force_detach": lambda t: {"os-force_detach": {}},
    "os-reserve": lambda t: {"os-reserve": {}},
    "os-unreserve": lambda t: {"os-unreserve": {}},
    "os-begin_detaching": lambda t: {"os-begin_detaching": {}},
    "os-roll_detaching": lambda t: {"os-roll_detaching": {}},
    "os-attach": lambda t: {"os-attach": {"host_name": "x", "mountpoint": "/dev/vdb"}},
    "os-detach": lambda t: {"os-detach": {}},
    "os-initialize_connection": lambda t: {"os-initialize_connection": {"connector": {"host": "x"}}},
    "os-terminate_connection": lambda t: {"os-terminate_connection": {"connector": {"host": "x"}}},
    "os-retype": lambda t: {"os-retype": {"new_type": t["volume type"]}},
    "os-volume_upload_image": lambda t: {"os-volume_upload_image": {"image_name": SECRET}},
    "os-reimage": lambda t: {"os-reimage": {"image_id": t["image"]}},
    "revert": lambda t: {"revert": {"snapshot_id": t["volume snapshot"]}},
    "os-set_image_metadata": lambda t: {"os-set_image_metadata": {"metadata": {SECRET: SECRET}}},
    "os-show_image_metadata": lambda t: {"os-show_image_metadata": None},
    "os-unset_image_metadata": lambda t: {"os-unset_image_metadata": {"key": SECRET}},
}

Body = Callable[[Things], Any]
_NAMED = {"name": "x"}


def _new(**fields: Any) -> dict[str, Any]:
    """Fields of something whose name must be new each time."""
    return {"name": f"x-{uuid.uuid4().hex}", **fields}


def _allocations(things: Things) -> dict[str, Any]:
    return {
        "allocations": {things["resource provider"]: {"resources": {CLASS: 1}}}, "consumer_generation": None,
        "project_id": things["project"], "user_id": things["user"], "consumer_type": "X",
    }  # fmt: skip


_GENERATION = {"resource_provider_generation": 0}
BODIES: dict[str, Body] = {
    # placement
    "POST /resource_providers": lambda t: _new(),
    "PUT /resource_providers/{uuid}": lambda t: _new(),
    "POST /resource_providers/{uuid}/inventories": lambda t: {"resource_class": "VCPU", "total": 1},
    "PUT /resource_providers/{uuid}/inventories": lambda t: {"inventories": {}, **_GENERATION},
    "PUT /resource_providers/{uuid}/inventories/{resource_class}": lambda t: {"total": 1, **_GENERATION},
    "PUT /resource_providers/{uuid}/aggregates": lambda t: {"aggregates": [], **_GENERATION},
    "PUT /resource_providers/{uuid}/traits": lambda t: {"traits": [], **_GENERATION},
    "POST /resource_classes": lambda t: {"name": f"CUSTOM_{uuid.uuid4().hex.upper()}"},
    "PUT /resource_classes/{name} to 2.6": lambda t: {"name": f"CUSTOM_{uuid.uuid4().hex.upper()}"},
    "PUT /allocations/{consumer_uuid}": _allocations,
    "POST /allocations": lambda t: {t["consumer"]: _allocations(t)},
    "POST /reshaper": lambda t: {
        "inventories": {t["resource provider"]: {"inventories": {}, **_GENERATION}}, "allocations": {},
    },
    # identity
    "POST /v3/auth/tokens": lambda t: {"auth": {"identity": {"methods": ["token"], "token": {"id": t["token"]}}}},
    "POST /v3/domains": lambda t: {"domain": _new()},
    "PATCH /v3/domains/{domain_id}": lambda t: {"domain": {"description": "x"}},
    "POST /v3/projects": lambda t: {"project": _new()},
    "PATCH /v3/projects/{project_id}": lambda t: {"project": {"description": "x"}},
    "PUT /v3/projects/{project_id}/tags": lambda t: {"tags": ["x"]},
    "POST /v3/users": lambda t: {"user": _new()},
    "PATCH /v3/users/{user_id}": lambda t: {"user": {"description": "x"}},
    "POST /v3/users/{user_id}/password": lambda t: {"user": {"original_password": "wrong", "password": "other"}},
    "POST /v3/groups": lambda t: {"group": _new()},
    "PATCH /v3/groups/{group_id}": lambda t: {"group": {"description": "x"}},
    "POST /v3/roles": lambda t: {"role": _new()},
    "PATCH /v3/roles/{role_id}": lambda t: {"role": {"description": "x"}},
    "POST /v3/users/{user_id}/application_credentials": lambda t: {"application_credential": _new()},
    "POST /v3/credentials": lambda t: {"credential": {"type": "cert", "blob": "x", "user_id": t["user"]}},
    "PATCH /v3/credentials/{credential_id}": lambda t: {"credential": {"blob": SECRET}},
    "POST /v3/users/{user_id}/credentials/OS-EC2": lambda t: {"tenant_id": t["project"]},
    "POST /v3/ec2tokens": lambda t: {"credentials": version_4(t["access key"], t["secret key"], time.time())},
    "POST /v3/OS-TRUST/trusts": lambda t: {
        "trust": {
            "trustor_user_id": t["user"], "trustee_user_id": t["user"], "project_id": t["project"],
            "impersonation": True, "roles": [{"name": "member"}],
        }
    },
    "POST /v3/registered_limits": lambda t: {
        "registered_limits": [{"service_id": t["service"], "resource_name": uuid.uuid4().hex, "default_limit": 1}]
    },
    "PATCH /v3/registered_limits/{registered_limit_id}": lambda t: {"registered_limit": {"description": "x"}},
    "POST /v3/limits": lambda t: {
        "limits": [
            {
                "service_id": t["service"], "resource_name": "fortunes", "resource_limit": 1,
                "project_id": t["other project"],
            }
        ]
    },
    "PATCH /v3/limits/{limit_id}": lambda t: {"limit": {"resource_limit": 1}},
    "POST /v3/regions": lambda t: {"region": {"description": "x"}},
    "PUT /v3/regions/{region_id}": lambda t: {"region": {"description": "x"}},
    "PATCH /v3/regions/{region_id}": lambda t: {"region": {"description": "x"}},
    "POST /v3/services": lambda t: {"service": {"type": "x"}},
    "PATCH /v3/services/{service_id}": lambda t: {"service": {"description": "x"}},
    "POST /v3/endpoints": lambda t: {
        "endpoint": {"service_id": t["service"], "interface": "public", "url": "http://x.example.org"}
    },
    "PATCH /v3/endpoints/{endpoint_id}": lambda t: {"endpoint": {"interface": "admin"}},
    # volume
    "POST /volumes": lambda t: {"volume": {"name": "x", "size": 1}},
    "PUT /volumes/{volume_id}": lambda t: {"volume": {"name": SECRET}},
    **{f"{method} /{kind}s/{{{kind}_id}}/metadata": lambda t: {"metadata": {SECRET: SECRET}}
       for kind in ("volume", "snapshot") for method in ("POST", "PUT")},
    **{f"PUT /{kind}s/{{{kind}_id}}/metadata/{{key}}": lambda t: {"meta": {SECRET: SECRET}}
       for kind in ("volume", "snapshot")},
    **{f"POST /volumes/{{volume_id}}/action {action}": good for action, good in _VOLUME_ACTIONS.items()},
    "POST /attachments": lambda t: {"attachment": {"volume_uuid": t["volume"]}},
    "PUT /attachments/{attachment_id}": lambda t: {"attachment": {"connector": {"host": "x"}}},
    "POST /attachments/{attachment_id}/action os-complete": lambda t: {"os-complete": None},
    "POST /types": lambda t: {"volume_type": {"name": uuid.uuid4().hex}},
    "PUT /types/{type_id}": lambda t: {"volume_type": {"description": "x"}},
    "POST /types/{type_id}/extra_specs": lambda t: {"extra_specs": {"a": "b"}},
    "PUT /types/{type_id}/extra_specs/{key}": lambda t: {SECRET: SECRET},
    "POST /types/{type_id}/action addProjectAccess": lambda t: {"addProjectAccess": {"project": uuid.uuid4().hex}},
    "POST /types/{type_id}/action removeProjectAccess": lambda t: {"removeProjectAccess": {"project": t["project"]}},
    "PUT /default-types/{project}": lambda t: {"default_type": {"volume_type": "__DEFAULT__"}},
    "POST /qos-specs": lambda t: {"qos_specs": {"name": uuid.uuid4().hex}},
    "PUT /qos-specs/{specs_id}": lambda t: {"qos_specs": {"total_iops_sec": "100"}},
    "PUT /qos-specs/{specs_id}/delete_keys": lambda t: {"keys": ["total_iops_sec"]},
    "PUT /os-quota-sets/{project}": lambda t: {"quota_set": {"volumes": -1}},
    "PUT /os-quota-class-sets/{class_name}": lambda t: {"quota_class_set": {"groups": -1}},
    **{f"PUT /os-services/{verb}": lambda t: {"binary": "cinder-scheduler", "host": "controller"}
       for verb in ("enable", "disable")},
    **{f"PUT /os-services/{verb}": lambda t: {"host": "controller@files"} for verb in ("freeze", "thaw")},
    "PUT /os-hosts/{host}": lambda t: {"status": "enable"},
    "POST /types/{type_id}/encryption": lambda t: {"encryption": {"provider": "luks", "control_location": "front-end"}},
    "PUT /types/{type_id}/encryption/{key}": lambda t: {"encryption": {"cipher": "aes-xts-plain64"}},
    "POST /backups/import_record": lambda t: {
        "backup-record": {"backup_service": "cinder.backup.drivers.micronova", "backup_url": "bm90IGEgcmVjb3Jk"}},
    "PUT /os-services/disable-log-reason": lambda t: {
        "binary": "cinder-scheduler", "host": "controller", "disabled_reason": "x"},
    **{f"POST /{path}": lambda t: {"transfer": {"volume_id": t["volume"]}}
       for path in ("os-volume-transfer", "volume-transfers")},
    **{f"POST /{path}/{{transfer_id}}/accept": lambda t: {"accept": {"auth_key": "not the key"}}
       for path in ("os-volume-transfer", "volume-transfers")},
    "POST /backups": lambda t: {"backup": {"volume_id": t["volume"]}},
    "PUT /backups/{backup_id}": lambda t: {"backup": {"name": SECRET}},
    "POST /backups/{backup_id}/restore": lambda t: {"restore": {"name": SECRET}},
    "POST /backups/{backup_id}/action os-reset_status": lambda t: {"os-reset_status": {"status": "available"}},
    "POST /backups/{backup_id}/action os-force_delete": lambda t: {"os-force_delete": None},
    "POST /snapshots": lambda t: {"snapshot": {"volume_id": t["volume"]}},
    "PUT /snapshots/{snapshot_id}": lambda t: {"snapshot": {"name": SECRET}},
    "POST /snapshots/{snapshot_id}/action os-reset_status": lambda t: {"os-reset_status": {"status": "available"}},
    "POST /snapshots/{snapshot_id}/action os-update_snapshot_status": lambda t: {
        "os-update_snapshot_status": {"status": "available"}},
    "POST /snapshots/{snapshot_id}/action os-force_delete": lambda t: {"os-force_delete": None},
    # image
    "POST /v2/images": lambda t: _NAMED,
    "PATCH /v2/images/{image_id}": lambda t: [{"op": "replace", "path": "/name", "value": "x"}],
    "PUT /v2/images/{image_id}/file": lambda t: b"data",
    "PUT /v2/images/{image_id}/stage": lambda t: b"data",
    "POST /v2/images/{image_id}/import": lambda t: {"method": {"name": "glance-direct"}},
    "POST /v2/images/{image_id}/members": lambda t: {"member": uuid.uuid4().hex},
    "PUT /v2/images/{image_id}/members/{member_id}": lambda t: {"status": "accepted"},
    "POST /v2/tasks": lambda t: {"type": "import"},
    "POST /v2/metadefs/namespaces": lambda t: {"namespace": f"x-{uuid.uuid4().hex}"},
    "PUT /v2/metadefs/namespaces/{namespace}": lambda t: {"namespace": t["namespace"]},
    "POST /v2/metadefs/namespaces/{namespace}/resource_types": lambda t: _new(),
    "POST /v2/metadefs/namespaces/{namespace}/objects": lambda t: _new(),
    "PUT /v2/metadefs/namespaces/{namespace}/objects/{object_name}": lambda t: _NAMED,
    "POST /v2/metadefs/namespaces/{namespace}/properties": lambda t: _new(title="x", type="string"),
    "PUT /v2/metadefs/namespaces/{namespace}/properties/{property_name}": lambda t: {
        "name": "x", "title": "x", "type": "string"
    },
    "POST /v2/metadefs/namespaces/{namespace}/tags": lambda t: {"tags": [_NAMED]},
    "PUT /v2/metadefs/namespaces/{namespace}/tags/{tag_name}": lambda t: _NAMED,
    # network
    "POST /v2.0/rbac-policies": lambda t: {
        "rbac_policy": {
            "object_type": "network", "object_id": t["networks"], "action": "access_as_shared",
            "target_tenant": uuid.uuid4().hex,
        }
    },
    "PUT /v2.0/rbac-policies/{id}": lambda t: {"rbac_policy": {"target_tenant": uuid.uuid4().hex}},
    "POST /v2.0/default-security-group-rules": lambda t: {
        "default_security_group_rule": {"direction": "ingress", "protocol": "tcp"}
    },
    "POST /v2.0/networks": lambda t: {"network": _NAMED},
    "PUT /v2.0/networks/{id}": lambda t: {"network": _NAMED},
    "POST /v2.0/subnets": lambda t: {
        "subnet": {"network_id": t["networks"], "cidr": "10.50.0.0/24", "ip_version": 4}
    },
    "PUT /v2.0/subnets/{id}": lambda t: {"subnet": _NAMED},
    "POST /v2.0/subnetpools": lambda t: {"subnetpool": {"name": "x", "prefixes": ["10.90.0.0/16"]}},
    "PUT /v2.0/subnetpools/{id}": lambda t: {"subnetpool": _NAMED},
    "POST /v2.0/ports": lambda t: {"port": {"network_id": t["networks"]}},
    "PUT /v2.0/ports/{id}": lambda t: {"port": _NAMED},
    "POST /v2.0/security-groups": lambda t: {"security_group": _NAMED},
    "PUT /v2.0/security-groups/{id}": lambda t: {"security_group": _NAMED},
    "POST /v2.0/security-group-rules": lambda t: {
        "security_group_rule": {
            "security_group_id": t["security-groups"], "direction": "ingress", "protocol": "udp",
            "port_range_min": 53, "port_range_max": 53,
        }
    },
    "POST /v2.0/routers": lambda t: {"router": _NAMED},
    "PUT /v2.0/routers/{id}": lambda t: {"router": _NAMED},
    "PUT /v2.0/routers/{id}/add_router_interface": lambda t: {"subnet_id": t["spare subnet"]},
    "PUT /v2.0/routers/{id}/remove_router_interface": lambda t: {"subnet_id": t["subnets"]},
    "PUT /v2.0/routers/{id}/add_extraroutes": lambda t: {"router": {"routes": []}},
    "PUT /v2.0/routers/{id}/remove_extraroutes": lambda t: {"router": {"routes": []}},
    "PUT /v2.0/routers/{id}/add_external_gateways": lambda t: {"router": {"external_gateways": []}},
    "PUT /v2.0/routers/{id}/update_external_gateways": lambda t: {
        "router": {"external_gateways": [{"network_id": t["public"]}]}
    },
    "PUT /v2.0/routers/{id}/remove_external_gateways": lambda t: {"router": {"external_gateways": []}},
    "POST /v2.0/address-scopes": lambda t: {"address_scope": {**_NAMED, "ip_version": 4}},
    "PUT /v2.0/address-scopes/{id}": lambda t: {"address_scope": _NAMED},
    "POST /v2.0/trunks": lambda t: {"trunk": {**_NAMED, "port_id": t["spare port"]}},
    "PUT /v2.0/trunks/{id}": lambda t: {"trunk": _NAMED},
    "PUT /v2.0/trunks/{id}/add_subports": lambda t: {"sub_ports": []},
    "PUT /v2.0/trunks/{id}/remove_subports": lambda t: {"sub_ports": [{"port_id": t["subport"]}]},
    "POST /v2.0/floatingips": lambda t: {"floatingip": {"floating_network_id": t["public"], "port_id": t["ports"]}},
    "PUT /v2.0/floatingips/{id}": lambda t: {"floatingip": {"description": "x"}},
    "POST /v2.0/qos/policies": lambda t: {"policy": _NAMED},
    "PUT /v2.0/qos/policies/{id}": lambda t: {"policy": _NAMED},
    "POST /v2.0/qos/policies/{id}/bandwidth_limit_rules": lambda t: {
        "bandwidth_limit_rule": {"max_kbps": 500, "direction": "ingress"}
    },
    "POST /v2.0/qos/policies/{id}/dscp_marking_rules": lambda t: {"dscp_marking_rule": {"dscp_mark": 8}},
    "POST /v2.0/qos/policies/{id}/minimum_bandwidth_rules": lambda t: {
        "minimum_bandwidth_rule": {"min_kbps": 1, "direction": "ingress"}
    },
    "PUT /v2.0/qos/policies/{id}/minimum_bandwidth_rules/{rule}": lambda t: {"minimum_bandwidth_rule": {"min_kbps": 1}},
    "PUT /v2.0/qos/policies/{id}/dscp_marking_rules/{rule}": lambda t: {"dscp_marking_rule": {"dscp_mark": 8}},
    "PUT /v2.0/qos/policies/{id}/bandwidth_limit_rules/{rule}": lambda t: {"bandwidth_limit_rule": {"max_kbps": 600}},
    "PUT /v2.0/agents/{id}": lambda t: {"agent": {"description": "x"}},
    "POST /v2.0/agent-reports": lambda t: {"host": "a-host-without-guests"},
    "PUT /v2.0/quotas/{project}": lambda t: {"quota": {"port": 77}},
    # metadata
    "POST /{path:path}": lambda t: b"data",
    # compute
    "POST /servers": lambda t: {
        "server": {
            "name": "x", "imageRef": t["image"], "flavorRef": t["flavors"], "networks": [{"uuid": t["networks"]}],
        }
    },
    "PUT /servers/{id}": lambda t: {"server": _NAMED},
    "POST /servers/{id}/action os-start": lambda t: {"os-start": None},
    "POST /servers/{id}/action os-stop": lambda t: {"os-stop": None},
    "POST /servers/{id}/action reboot": lambda t: {"reboot": {"type": "HARD"}},
    "POST /servers/{id}/action rebuild": lambda t: {"rebuild": {"imageRef": t["image"]}},
    **{f"POST /servers/{{id}}/action {action}": lambda t, action=action: {action: None}  # type: ignore[misc]
       for action in ("pause", "unpause", "suspend", "resume", "rescue", "unrescue", "trigger_crash_dump", "lock",
                      "unlock", "forceDelete", "restore", "injectNetworkInfo", "confirmResize", "revertResize",
                      "migrate", "shelve", "shelveOffload", "unshelve")},
    "POST /servers/{id}/action changePassword": lambda t: {"changePassword": {"adminPass": "x"}},
    "POST /servers/{id}/action createImage": lambda t: {"createImage": _NAMED},
    "POST /servers/{id}/action createBackup": lambda t: {
        "createBackup": {**_NAMED, "backup_type": "daily", "rotation": 1}
    },
    "POST /servers/{id}/action resize": lambda t: {"resize": {"flavorRef": "1"}},
    "POST /servers/{id}/action evacuate": lambda t: {"evacuate": {}},
    "POST /servers/{id}/action os-migrateLive": lambda t: {"os-migrateLive": {"host": None, "block_migration": "auto"}},
    "POST /servers/{id}/migrations/{migration_id}/action force_complete": lambda t: {"force_complete": None},
    "POST /servers/{id}/action addSecurityGroup": lambda t: {"addSecurityGroup": {"name": t["security-groups"]}},
    "POST /servers/{id}/action removeSecurityGroup": lambda t: {"removeSecurityGroup": {"name": t["security-groups"]}},
    "POST /servers/{id}/action os-resetState": lambda t: {"os-resetState": {"state": "active"}},
    "POST /servers/{id}/os-interface": lambda t: {"interfaceAttachment": {"net_id": t["networks"]}},
    "POST /servers/{id}/action os-getConsoleOutput": lambda t: {"os-getConsoleOutput": {"length": 5}},
    "POST /servers/{id}/action os-getVNCConsole": lambda t: {"os-getVNCConsole": {"type": "novnc"}},
    "POST /servers/{id}/action os-getSPICEConsole": lambda t: {"os-getSPICEConsole": {"type": "spice-html5"}},
    "POST /servers/{id}/action os-getSerialConsole": lambda t: {"os-getSerialConsole": {"type": "serial"}},
    "POST /servers/{id}/remote-consoles": lambda t: _CONSOLE,
    "POST /servers/{id}/metadata": lambda t: {"metadata": {"a": "b"}},
    "PUT /servers/{id}/metadata": lambda t: {"metadata": {"a": "b"}},
    "PUT /servers/{id}/metadata/{key}": lambda t: {"meta": {SECRET: "b"}},
    "PUT /servers/{id}/tags": lambda t: {"tags": ["x"]},
    "POST /os-server-external-events": lambda t: {
        "events": [{"name": "network-changed", "server_uuid": t["servers"]}]
    },
    "POST /os-server-groups": lambda t: {"server_group": {"name": "x", "policy": "affinity"}},
    "POST /flavors": lambda t: {"flavor": _new(ram=1, vcpus=1, disk=1)},
    "PUT /flavors/{id}": lambda t: {"flavor": {"description": "x"}},
    "POST /flavors/{id}/os-extra_specs": lambda t: {"extra_specs": {"hw:cpu_policy": "shared"}},
    "PUT /flavors/{id}/os-extra_specs/{key}": lambda t: {"hw:cpu_policy": "shared"},
    "POST /flavors/{id}/action addTenantAccess": lambda t: {"addTenantAccess": {"tenant": t["other project"]}},
    "POST /flavors/{id}/action removeTenantAccess": lambda t: {"removeTenantAccess": {"tenant": t["other project"]}},
    "POST /os-keypairs": lambda t: {"keypair": _new(public_key=KEY)},
    "PUT /os-quota-sets/{id}": lambda t: {"quota_set": {"cores": 99}},
    "PUT /os-quota-class-sets/{id}": lambda t: {"quota_class_set": {"cores": 99}},
    "PUT /os-services/{id}": lambda t: {"status": "disabled"},
    "PUT /os-services/{id} to 2.52": lambda t: {"host": "fake-1", "binary": "nova-compute"},
    "PUT /os-hosts/{id}": lambda t: {"status": "disable"},
    "POST /os-aggregates": lambda t: {"aggregate": _new()},
    "PUT /os-aggregates/{id}": lambda t: {"aggregate": {"name": "y"}},
    "POST /os-aggregates/{id}/action add_host": lambda t: {"add_host": {"host": "fake-1"}},
    "POST /os-aggregates/{id}/action remove_host": lambda t: {"remove_host": {"host": "fake-2"}},
    "POST /os-aggregates/{id}/action set_metadata": lambda t: {"set_metadata": {"metadata": {"a": "b"}}},
    # of services that compute does not use
    "POST /servers/{id}/os-volume_attachments": lambda t: {"volumeAttachment": {"volumeId": t["no volume"]}},
    "PUT /servers/{id}/os-volume_attachments/{volume}": lambda t: {"volumeAttachment": {"volumeId": t["no volume"]}},
    "POST /servers/{id}/shares": lambda t: {"share": {"share_id": t["no volume"]}},
    "POST /os-volumes": lambda t: {"volume": {"size": 1}},
    "POST /os-snapshots": lambda t: {"snapshot": {"volume_id": t["os-volumes"]}},
    "POST /os-assisted-volume-snapshots": lambda t: {
        "snapshot": {
            "volume_id": t["no volume"],
            "create_info": {"snapshot_id": t["no volume"], "type": "qcow2", "new_file": "x"},
        }
    },
    "PUT /os-fault-rules/{host}": lambda t: {"rules": []},
    # proxies of other services
    "POST /images/{id}/metadata": lambda t: {"metadata": {"a": "b"}},
    "PUT /images/{id}/metadata": lambda t: {"metadata": {SECRET: "b"}},
    "PUT /images/{id}/metadata/{key}": lambda t: {"meta": {SECRET: "b"}},
    "POST /os-security-groups": lambda t: {"security_group": {"name": "x", "description": ""}},
    "PUT /os-security-groups/{id}": lambda t: {"security_group": {"name": "x", "description": ""}},
    "POST /os-security-group-rules": lambda t: {
        "security_group_rule": {
            "parent_group_id": t["security-groups"], "ip_protocol": "udp", "from_port": 54, "to_port": 54,
        }
    },
    "POST /os-floating-ips": lambda t: {"pool": t["public"]},
    "POST /servers/{id}/action addFixedIp": lambda t: {"addFixedIp": {"networkId": t["networks"]}},
    "POST /servers/{id}/action removeFixedIp": lambda t: {"removeFixedIp": {"address": t["fixed ip"]}},
    "POST /servers/{id}/action addFloatingIp": lambda t: {"addFloatingIp": {"address": t["floating ip"]}},
    "POST /servers/{id}/action removeFloatingIp": lambda t: {"removeFloatingIp": {"address": t["floating ip"]}},
    "POST /os-aggregates/{id}/images": lambda t: {"cache": [{"id": t["image"]}]},
}  # fmt: skip


def query_names(route: Route) -> set[str]:
    """Return the query parameters that a route declares: by a type, or by a JSON schema for each microversion."""
    if route.query is None:
        return set()
    if isinstance(route.query, type):
        return set(route.query.__struct_encode_fields__)  # type: ignore[attr-defined]
    return set(route.query(newest(route))["properties"])


def body(route: Route, things: Things) -> Any:
    """Return a body with which the route would do its work."""
    if is_removed(route):
        return {route.action: None} if route.action else None
    label = route.label.replace("/os-volumes_boot", "/servers")
    if route.versions.until < NEWEST and f"{label} to 2.{route.versions.until}" in BODIES:
        label = f"{label} to 2.{route.versions.until}"
    if label in BODIES:
        return BODIES[label](things)
    if label.endswith("/tags") and route.method in ("PUT", "POST"):
        return {"tags": ["x"]}
    if route.body is not None or route.raw_body or route.action:
        raise Unknown(f"What is a good body for {route.label}? Say so in {__name__}.")
    return None


def headers(route: Route, things: Things) -> dict[str, str]:
    """Return the headers that a route needs besides the usual ones."""
    if route.raw_body:
        return {"content-type": "application/octet-stream"}
    if route.label == "PATCH /v2/images/{image_id}":
        return {"content-type": "application/openstack-images-v2.1-json-patch"}
    if route.path == "/v3/auth/tokens" and route.method != "POST":
        return {"x-subject-token": things["token"]}
    return {}
