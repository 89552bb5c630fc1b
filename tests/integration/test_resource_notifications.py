"""A real oslo.messaging listener receives notifications about what is not a server, about changes, and about usage."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from micronova.conductor.usage_audit import UsageAudit
from micronova.notifications.usage import last_completed
from micronova.objects.clock import SystemClock, micros
from tests.functional.cloud import Caller, CloudOptions, OneProcess, one_process
from tests.integration.test_notifications import _settings
from tests.oslo.listener import listening
from tests.schemas.notifications import check

pytestmark = pytest.mark.timeout(180)


async def test_what_admins_and_users_make_is_notified(tmp_path: Path, database_url: str, amqp_url: str) -> None:
    async with listening(amqp_url) as listener:
        async with one_process(tmp_path, CloudOptions(hosts=2, settings=_settings(database_url, amqp_url))) as cloud:
            await listener.until(lambda: len(listener.of("service.create", "fake-2")) > 0)
            user = cloud.caller()
            await _change_everything(cloud, user)
            await listener.until(lambda: len(listener.of("aggregate.delete.end")) > 1)
        versioned = [each for each in listener.received if "nova_object.name" in each["payload"]]
        for each in versioned:
            check(each["payload"])
        seen = {each["event_type"] for each in versioned}
        assert seen >= {
            *(f"aggregate.{action}.{phase}" for phase in ("start", "end") for action in AGGREGATE_ACTIONS),
            *(f"keypair.{action}.{phase}" for phase in ("start", "end") for action in ("create", "import", "delete")),
            *(f"flavor.{action}" for action in ("create", "update", "delete")),
            *(f"server_group.{action}" for action in ("create", "add_member", "delete")),
            *(f"service.{action}" for action in ("create", "update", "delete")),
        }
        old = {each["event_type"] for each in listener.received if "nova_object.name" not in each["payload"]}
        assert old >= {
            *(
                f"aggregate.{action.replace('_', '')}.{phase}"
                for phase in ("start", "end")
                for action in AGGREGATE_ACTIONS
            ),
            *(f"keypair.{action}.{phase}" for phase in ("start", "end") for action in ("create", "import", "delete")),
            *(f"servergroup.{action}" for action in ("create", "addmember", "delete")),
        }
        [made] = listener.of("flavor.create")
        assert made["context"]["project_id"] == user.project and made["context"]["request_id"]
        updates = [each["payload"]["nova_object.data"] for each in listener.of("flavor.update")]
        specs = sorted(str(update["extra_specs"].get("a")) for update in updates)  # a listener has several threads
        assert specs == ["None", "None", "b", "b", "c"]
        binaries = {each["payload"]["nova_object.data"]["binary"] for each in listener.of("service.create")}
        assert binaries == {"nova-compute", "nova-conductor", "nova-scheduler"}
        assert listener.of("service.update")[0]["publisher_id"] == "nova-compute:fake-1"


AGGREGATE_ACTIONS = ("create", "add_host", "remove_host", "update_prop", "update_metadata", "delete")
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEgrr4VKlvI4YyeFL5Ej/0tBUaKhIqk5M2u6YCEXeQbD x"


async def _change_everything(cloud: OneProcess, user: Caller) -> None:
    admin, old = user.admin, user.at(91)
    await old.post("/os-keypairs", {"keypair": {"name": "made"}}, 201)
    await old.post("/os-keypairs", {"keypair": {"name": "brought", "public_key": KEY}}, 201)
    await old.delete("/os-keypairs/made")
    body = {"flavor": {"name": "f", "ram": 64, "vcpus": 1, "disk": 1, "os-flavor-access:is_public": False}}
    flavor = f"/flavors/{(await admin.post('/flavors', body, 200))['flavor']['id']}"
    await admin.put(flavor, {"flavor": {"description": "d"}})
    await admin.post(f"{flavor}/os-extra_specs", {"extra_specs": {"a": "b"}}, 200)
    await admin.post(f"{flavor}/action", {"addTenantAccess": {"tenant": user.project}}, 200)
    await admin.put(f"{flavor}/os-extra_specs/a", {"a": "c"})
    await admin.delete(f"{flavor}/os-extra_specs/a", 200)
    await admin.delete(flavor, 202)
    group = (await user.post("/os-server-groups", {"server_group": {"name": "g", "policy": "affinity"}}, 200))[
        "server_group"
    ]
    server = await user.boot({"group": group["id"]})
    await user.delete(f"/servers/{server['id']}")
    await user.gone(server["id"])
    await user.delete(f"/os-server-groups/{group['id']}")
    made = await admin.post("/os-aggregates", {"aggregate": {"name": "rack", "availability_zone": "z"}}, 200)
    aggregate = f"/os-aggregates/{made['aggregate']['id']}"
    await admin.post(f"{aggregate}/action", {"add_host": {"host": "fake-1"}}, 200)
    await admin.post(f"{aggregate}/action", {"set_metadata": {"metadata": {"ssd": "true"}}}, 200)
    await admin.put(aggregate, {"aggregate": {"name": "row"}})
    await admin.post(f"{aggregate}/action", {"remove_host": {"host": "fake-1"}}, 200)
    services = {each["host"]: each["id"] for each in (await admin.get("/os-services?binary=nova-compute"))["services"]}
    await admin.put(f"/os-services/{services['fake-1']}", {"status": "disabled", "disabled_reason": "r"})
    await admin.put(f"/os-services/{services['fake-1']}", {"status": "enabled"})
    await admin.delete(f"/os-services/{services['fake-2']}")
    await admin.delete(aggregate, 200)


async def test_failures_are_notified_of(tmp_path: Path, database_url: str, amqp_url: str) -> None:
    wanted = CloudOptions(hosts=2, settings=_settings(database_url, amqp_url, fake={"memory_mb": 4096}))
    async with listening(amqp_url) as listener, one_process(tmp_path, wanted) as cloud:
        user = cloud.caller()
        unplaced = await user.create(flavorRef="5")
        await user.wait_for(unplaced, "ERROR")
        async with cloud.faults({"operation": "spawn", "kind": "abort", "name": "breaks"}):
            broken = await user.create(name="breaks")
            await user.wait_for(broken, "ERROR")
        gave_up = "compute_task.build_instances.error"
        await listener.until(lambda: bool(listener.of(gave_up, unplaced) and listener.of("compute.exception")))
        [failed] = listener.of(gave_up)
        data = check(failed["payload"], "ComputeTaskPayload")
        assert (data["instance_uuid"], data["state"], failed["priority"]) == (unplaced, "error", "error")
        assert data["request_spec"]["nova_object.data"]["flavor"]["nova_object.data"]["memory_mb"] == 16384
        [old] = listener.of("compute_task.build_instances", unplaced)
        assert old["payload"]["method"] == "build_instances" and old["publisher_id"] == "compute_task.controller"
        [wrong] = listener.of("compute.exception")
        check(wrong["payload"], "ExceptionPayload")
        assert wrong["publisher_id"].startswith("nova-compute:fake-")
        assert listener.of("build", broken)[0]["priority"] == "error"
        await cloud.delete_all()


@pytest.mark.parametrize("detail", ["vm_state", "vm_and_task_state"])
async def test_every_change_is_notified_of_if_wanted(
    tmp_path: Path, database_url: str, amqp_url: str, detail: str
) -> None:
    sections = _settings(database_url, amqp_url, notifications={"notify_on_state_change": detail})
    async with (
        listening(amqp_url) as listener,
        one_process(tmp_path, CloudOptions(hosts=2, settings=sections)) as cloud,
    ):
        user = cloud.caller()
        id = (await user.boot(name="before"))["id"]
        await user.put(f"/servers/{id}", {"server": {"name": "after"}})
        await user.act(id, "os-stop")
        await user.wait_for(id, "SHUTOFF")
        await user.delete(f"/servers/{id}")
        await user.gone(id)

        def changes() -> list[tuple[Any, ...]]:
            found = [check(each["payload"]) for each in listener.of("instance.update", id)]
            updates = [each["state_update"]["nova_object.data"] for each in found]
            return [
                tuple(each[name] for name in ("old_state", "state", "old_task_state", "new_task_state"))
                for each in updates
            ]

        await listener.until(lambda: any(each[1] == "deleted" for each in changes()))
        found = changes()
        assert found[0][:2] == (None, "building")
        assert any(each[:2] == ("building", "active") for each in found)
        assert any(each[:2] == ("active", "stopped") for each in found)
        assert found[-1][:2] == ("stopped", "deleted")
        shown = ("active", "active", None, "powering-off") in found
        assert shown == (detail == "vm_and_task_state"), found
        renamed = [check(each["payload"]) for each in listener.of("instance.update", id)]
        assert "before" in {each["old_display_name"] for each in renamed}
        assert {each["action_initiator_user"] for each in renamed} == {user.user}
        await listener.until(lambda: len(listener.of("compute.instance.update", id)) >= len(found))
        old = listener.of("compute.instance.update", id)
        assert len(old) == len(found) and {"old_state", "state", "audit_period_ending"} <= set(old[0]["payload"])


STATES = ("old_state", "state", "old_task_state", "new_task_state")


class Later(SystemClock):
    """A clock that is ahead."""

    def now(self) -> float:
        return super().now() + 3600


async def test_the_usage_audit_reports_every_server_once(tmp_path: Path, database_url: str, amqp_url: str) -> None:
    sections = _settings(database_url, amqp_url)
    sections["default"] |= {"instance_usage_audit_period": "hour"}
    async with (
        listening(amqp_url) as listener,
        one_process(tmp_path, CloudOptions(hosts=2, settings=sections)) as cloud,
    ):
        user = cloud.caller()
        living, gone = (await user.boot())["id"], (await user.boot())["id"]
        await user.delete(f"/servers/{gone}")
        await user.gone(gone)
        assert cloud.process.database is not None
        audits = [UsageAudit(cloud.process.database, Later(), cloud.process.notifier, period="hour") for _ in range(2)]
        await asyncio.gather(*(audit.run() for audit in audits))  # one does it
        await audits[0].run()  # it is done
        await listener.until(
            lambda: bool(listener.of("instance.exists", living) and listener.of("instance.exists", gone))
        )
        await asyncio.gather(*(user.boot() for _ in range(1)))
        for id in (living, gone):
            [exists] = listener.of("instance.exists", id)
            data = check(exists["payload"], "InstanceExistsPayload")
            assert exists["publisher_id"] == f"nova-compute:{data['host']}"
            assert (data["deleted_at"] is not None) == (id == gone)
            [old] = listener.of("compute.instance.exists", id)
            assert old["payload"]["audit_period_beginning"] < old["payload"]["audit_period_ending"]
        period = last_completed("hour", micros(Later().now()))
        before = datetime.fromtimestamp(period.end / 1e6 + 1, UTC).strftime("%Y-%m-%d %H:%M:%S")
        shown = (await user.admin.get(f"/os-instance_usage_audit_log/{before}"))["instance_usage_audit_log"]
        assert (shown["num_hosts"], shown["num_hosts_done"], shown["overall_status"]) == (
            2,
            2,
            "ALL hosts done. 0 errors.",
        )
        assert shown["total_instances"] >= 2 and set(shown["log"]) == {"fake-1", "fake-2"}
        now = (await user.admin.get("/os-instance_usage_audit_log"))["instance_usage_audit_logs"]
        assert now["num_hosts_not_run"] == 2 and now["hosts_not_run"] == ["fake-1", "fake-2"]
        assert "timestamp" in await user.admin.refused(400, "GET", "/os-instance_usage_audit_log/yesterday")
        await cloud.delete_all()
