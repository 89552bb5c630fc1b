"""The budget of every server action: transactions and messages until its operation has ended."""

from pathlib import Path
from typing import Any

from tests.functional.cloud import Caller, Cloud, CloudOptions, only_in_one_process
from tests.functional.servers.embedded_services import image
from tests.functional.servers.test_budgets import SETTINGS, counted

pytestmark = only_in_one_process("counts the transactions and messages of the cloud's process")
CLOUD = CloudOptions(roles=("image",), settings=SETTINGS)
SPECIFICATION = Path(__file__).parents[3] / "SPECIFICATION.md"
LIVE = {"host": None, "block_migration": "auto"}
BACKUP = {"name": "backup", "backup_type": "daily", "rotation": 1}
# One after the other, with the status of the server afterwards.
ACTIONS: tuple[tuple[str, Any, str], ...] = (
    *(("os-stop", None, "SHUTOFF"), ("os-start", None, "ACTIVE"), ("reboot", {"type": "SOFT"}, "ACTIVE")),
    *(("pause", None, "PAUSED"), ("unpause", None, "ACTIVE"), ("suspend", None, "SUSPENDED")),
    *(("resume", None, "ACTIVE"), ("rescue", {}, "RESCUE"), ("unrescue", None, "ACTIVE")),
    *(("changePassword", {"adminPass": "s3cret"}, "ACTIVE"), ("trigger_crash_dump", None, "ACTIVE")),
    *(("createImage", {"name": "image"}, "ACTIVE"), ("createBackup", BACKUP, "ACTIVE")),
    *(("resize", {"flavorRef": "2"}, "VERIFY_RESIZE"), ("revertResize", None, "ACTIVE")),
    *(("resize", {"flavorRef": "2"}, "VERIFY_RESIZE"), ("confirmResize", None, "ACTIVE")),
    *(("migrate", None, "VERIFY_RESIZE"), ("confirmResize", None, "ACTIVE"), ("os-migrateLive", LIVE, "ACTIVE")),
    *(("shelve", None, "SHELVED_OFFLOADED"), ("unshelve", None, "ACTIVE")),
)


async def test_every_action(cloud: Cloud, user: Caller) -> None:
    """What each action costs is in SPECIFICATION.md; it depends neither on the number of servers nor of hosts."""
    image_id = await image(user)
    id = (await user.boot(imageRef=image_id))["id"]
    found: dict[str, dict[str, int]] = {}
    for action, value, status in (*ACTIONS, ("rebuild", {"imageRef": image_id}, "ACTIVE")):
        async with counted(cloud) as cost:
            answer = await user.admin.request("POST", f"/servers/{id}/action", {action: value})
            assert answer.status < 300, (action, answer.body)
            await cloud.settled()
        spent = {"writes": cost.writes, "messages": sum(cost.messages.values())}
        assert found.setdefault(action, spent) == spent, (action, cost.transactions, cost.messages)
        await user.wait_for(id, status)
    assert found == _promised()


def _promised() -> dict[str, dict[str, int]]:
    """Return the table of SPECIFICATION.md."""
    _, _, after = SPECIFICATION.read_text().partition("| action | write transactions | messages |\n")
    rows = [line.strip("| ").split(" | ") for line in after.partition("\n\n")[0].splitlines()[1:]]
    return {
        name: {"writes": int(writes), "messages": int(messages)}
        for names, writes, messages in rows
        for name in names.replace("`", "").split(", ")
    }
