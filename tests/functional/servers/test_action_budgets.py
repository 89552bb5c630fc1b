"""The budget of every server action: transactions and messages until its operation has ended."""

from pathlib import Path
from typing import Any, NamedTuple

from micronova.api.compute import removed
from micronova.api.compute.versions_doc import NEWEST
from micronova.embedded.network.port_events import OUTBOX
from tests.functional.cloud import Caller, Cloud, CloudOptions, one_process, only_in_one_process
from tests.functional.servers.embedded_services import image, make, network, ok, ports_of
from tests.functional.servers.test_budgets import SETTINGS, Cost, counted

pytestmark = only_in_one_process("counts the transactions and messages of the cloud's process")
CLOUD = CloudOptions(roles=("image", "network"), settings=SETTINGS)
LATER = CloudOptions(
    roles=("image",),
    settings=SETTINGS
    | {"default": SETTINGS["default"] | {"shelved_offload_time": -1, "reclaim_instance_interval": 3600.0}},
)
"""A cloud in which shelved servers keep their hosts, and deleted ones can be restored."""
SPECIFICATION = Path(__file__).parents[3] / "SPECIFICATION.md"
INTERFACES = frozenset({"attach", "detach"})
"""The names of requests in the table that are no server actions of the API."""
LIVE = {"host": None, "block_migration": "auto"}
BACKUP = {"name": "backup", "backup_type": "daily", "rotation": 1}


class Step(NamedTuple):
    """An action, and the status of the server afterwards."""

    action: str
    value: Any = None
    status: str = "ACTIVE"
    minor: int = NEWEST


# One after the other, on a server without networks.
ACTIONS = (
    *(Step("os-stop", None, "SHUTOFF"), Step("os-start"), Step("reboot", {"type": "SOFT"})),
    *(Step("pause", None, "PAUSED"), Step("unpause"), Step("suspend", None, "SUSPENDED"), Step("resume")),
    *(Step("rescue", {}, "RESCUE"), Step("unrescue"), Step("changePassword", {"adminPass": "s3cret"})),
    *(Step("trigger_crash_dump"), Step("createImage", {"name": "image"}), Step("createBackup", BACKUP)),
    *(Step("resize", {"flavorRef": "2"}, "VERIFY_RESIZE"), Step("revertResize")),
    *(Step("resize", {"flavorRef": "2"}, "VERIFY_RESIZE"), Step("confirmResize")),
    *(Step("migrate", None, "VERIFY_RESIZE"), Step("confirmResize"), Step("os-migrateLive", LIVE)),
    *(Step("shelve", None, "SHELVED_OFFLOADED"), Step("unshelve")),
    *(Step("lock"), Step("unlock"), Step("os-resetState", {"state": "error"}, "ERROR")),
    *(Step("os-resetState", {"state": "active"}), Step("os-getConsoleOutput", {})),
    *(Step("os-getVNCConsole", {"type": "novnc"}, minor=5), Step("os-getSerialConsole", {"type": "serial"}, minor=5)),
    Step("os-getSPICEConsole", {"type": "spice-html5"}, minor=5),
)


class Budgets:
    """What each action has cost so far."""

    def __init__(self) -> None:
        self.found: dict[str, list[Cost]] = {}

    async def act(self, user: Caller, id: str, step: Step) -> None:
        """Act on a server, and wait until it has the status."""
        body = {step.action: step.value}
        await self.ask(user.admin.at(step.minor), step.action, "POST", f"/servers/{id}/action", body)
        await user.wait_for(id, step.status)

    async def ask(self, user: Caller, action: str, method: str, path: str, body: Any = None) -> None:
        """Send a request, and count until its operation and the events of the network service have ended."""
        async with counted(user.cloud) as cost:
            answer = await user.request(method, path, body)
            assert answer.status < 300, (action, answer.body)
            await user.cloud.settled()
            await _events_sent(user.cloud)
            await user.cloud.settled()
        self.found.setdefault(action, []).append(cost)


async def test_every_action(cloud: Cloud, user: Caller, tmp_path: Path) -> None:
    """What each action costs is in SPECIFICATION.md; it depends neither on the number of servers nor of hosts."""
    budgets = Budgets()
    image_id = await image(user)
    id = (await user.boot(imageRef=image_id))["id"]
    for step in (*ACTIONS, Step("rebuild", {"imageRef": image_id})):
        await budgets.act(user, id, step)
    await _addresses(budgets, user, image_id)
    await _evacuate(budgets, user, id)
    async with one_process(tmp_path, LATER) as other:
        await _remove(budgets, other.caller())
    routes = cloud.process.services["compute"].routes
    declared = {
        route.action
        for route in routes
        if route.path == "/servers/{id}/action" and route.action and route.handler is not removed.gone
    }
    promised = _promised()
    assert promised.keys() == declared | INTERFACES, "an action without a budget, or a budget of nothing"
    assert budgets.found.keys() == promised.keys(), "an action that this test does not try"
    for action, costs in budgets.found.items():
        writes, messages = promised[action]
        for cost in costs:
            assert cost.writes in writes, (action, cost.transactions)
            assert sum(cost.messages.values()) == messages, (action, cost.messages)


async def _addresses(budgets: Budgets, user: Caller, image_id: str) -> None:
    """Change interfaces, addresses and security groups of a server with one port."""
    place, public = await network(user), await make(user.admin, "network", **{"router:external": True})
    outside = {"network_id": public["id"], "ip_version": 4, "cidr": "203.0.113.0/24", "enable_dhcp": False}
    await make(user.admin, "subnet", **outside)
    router = await make(user, "router", external_gateway_info={"network_id": public["id"]})
    [subnet] = (await ok(user, "GET", f"/network/v2.0/subnets?network_id={place['id']}"))["subnets"]
    path = f"/network/v2.0/routers/{router['id']}/add_router_interface"
    await ok(user, "PUT", path, {"subnet_id": subnet["id"]})
    made = await ok(user, "POST", "/network/v2.0/floatingips", {"floatingip": {"floating_network_id": public["id"]}})
    floating = {"address": made["floatingip"]["floating_ip_address"]}
    await make(user, "security_group", name="web")
    id = (await user.boot(imageRef=image_id, networks=[{"uuid": place["id"]}]))["id"]
    await _events_sent(user.cloud)
    [port] = await ports_of(user, id)
    first = {each["ip_address"] for each in port["fixed_ips"]}
    for step in (
        *(Step("addSecurityGroup", {"name": "web"}), Step("removeSecurityGroup", {"name": "web"})),
        *(Step("addFloatingIp", floating, minor=43), Step("removeFloatingIp", floating, minor=43)),
        *(Step("addFixedIp", {"networkId": place["id"]}, minor=43), Step("injectNetworkInfo")),
    ):
        await budgets.act(user, id, step)
    [port] = await ports_of(user, id)
    [second] = {each["ip_address"] for each in port["fixed_ips"]} - first
    await budgets.act(user, id, Step("removeFixedIp", {"address": second}, minor=43))
    interfaces = f"/servers/{id}/os-interface"
    await budgets.ask(user, "attach", "POST", interfaces, {"interfaceAttachment": {"net_id": place["id"]}})
    [new] = [each for each in await ports_of(user, id) if each["id"] != port["id"]]
    await budgets.ask(user, "detach", "DELETE", f"{interfaces}/{new['id']}")


async def _evacuate(budgets: Budgets, user: Caller, id: str) -> None:
    """Evacuate a server from a host that an admin calls down."""
    host = await user.host_of(id)
    [service] = (await user.admin.get(f"/os-services?host={host}&binary=nova-compute"))["services"]
    path = f"/os-services/{service['id']}"
    await user.admin.put(path, {"forced_down": True})
    await budgets.act(user, id, Step("evacuate", {}, "SHUTOFF"))
    await user.admin.put(path, {"forced_down": False})


async def _remove(budgets: Budgets, user: Caller) -> None:
    """Offload a shelved server, and restore and remove a deleted one."""
    id = (await user.boot(imageRef=await image(user)))["id"]
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED")
    await user.cloud.settled()
    await budgets.act(user, id, Step("shelveOffload", None, "SHELVED_OFFLOADED"))
    id = (await user.boot(imageRef=await image(user)))["id"]
    await user.delete(f"/servers/{id}")
    await user.wait_for(id, "SOFT_DELETED")
    await user.cloud.settled()
    await budgets.act(user, id, Step("restore"))
    await budgets.ask(user, "forceDelete", "POST", f"/servers/{id}/action", {"forceDelete": None})
    await user.gone(id)


async def _events_sent(cloud: Cloud) -> None:
    """Wait until compute has got all events of the network service."""
    if "network" not in cloud.process.embedded:
        return
    database = cloud.process.embedded["network"].core.database

    async def sent() -> bool | None:
        return None if await database.read(OUTBOX.count) else True

    await cloud.until(sent, "the events of the network service to be sent")


def _promised() -> dict[str, tuple[range, int]]:
    """Return the write transactions and messages of the table in SPECIFICATION.md, by action."""
    _, _, after = SPECIFICATION.read_text().partition("| action | write transactions | messages |\n")
    rows = [line.strip("| ").split(" | ") for line in after.partition("\n\n")[0].splitlines()[1:]]
    return {
        name: (range(int(least), int(most or least) + 1), int(messages))
        for names, writes, messages in rows
        for least, _, most in [writes.partition(" or ")]
        for name in names.replace("`", "").split(", ")
    }
