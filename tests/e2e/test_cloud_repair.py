"""Servers of a whole cloud are rescued, get another password, and are made to dump their memory."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.cloud import RealCloud
from tests.e2e.guests import Guest, Tenant, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

PASSWORD = 'p"ss wörd $1 /'


async def _image(tenant: Tenant, content: Path, **properties: Any) -> str:
    """Upload an image of the tenant's own."""
    person = tenant.person
    wanted = {"name": "own", "disk_format": "qcow2", "container_format": "bare", **properties}
    made = await person.do("POST", "/image/v2/images", wanted)
    headers = {"content-type": "application/octet-stream"}
    answer = await person.request("PUT", f"/image/v2/images/{made['id']}/file", content.read_bytes(), headers)
    assert answer.status == 204, answer.body
    return str(made["id"])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guest(cloud: RealCloud, test_image: Path) -> AsyncIterator[Guest]:
    """A guest whose image has an agent."""
    tenant = await cloud.tenant("10.83.0.0/24")
    try:
        image = await _image(tenant, test_image, hw_qemu_guest_agent="yes")
        made = await tenant.boot("rita", imageRef=image, config_drive=True)
        await made.ready()
        yield made
    finally:
        await tenant.clear()
    assert cloud.guest_leftovers() == []


async def _by_password(guest: Guest, password: str, folder: Path) -> bool:
    """Return whether a password lets us in."""
    script = folder / "askpass"
    script.write_text(f"#!/usr/bin/env python3\nprint({password!r})\n")
    script.chmod(0o700)
    done = await guest.outside(
        *("env", f"SSH_ASKPASS={script}", "SSH_ASKPASS_REQUIRE=force", "ssh"),
        *("-F", "none", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"),
        *("-o", "PubkeyAuthentication=no", "-o", "PreferredAuthentications=password", "-o", "ConnectTimeout=10"),
        *("-o", "NumberOfPasswordPrompts=1", f"root@{await guest.floating_ip()}", "true"),
    )
    return done.returncode == 0


async def test_a_password_is_set_and_lets_us_in(guest: Guest, cloud: RealCloud, tmp_path: Path) -> None:
    await guest.ssh("true")
    assert not await _by_password(guest, PASSWORD, tmp_path)
    await guest.act("changePassword", {"adminPass": PASSWORD})  # it is set when the answer comes
    assert await _by_password(guest, PASSWORD, tmp_path)
    assert PASSWORD not in cloud.log
    shown = await guest.show()
    assert (shown["status"], shown["OS-EXT-STS:task_state"]) == ("ACTIVE", None)


async def test_an_image_without_an_agent_answers_409(guest: Guest) -> None:
    other = await guest.tenant.boot("no-agent")
    await other.ready()
    body = {"changePassword": {"adminPass": PASSWORD}}
    answer = await guest.tenant.person.request("POST", f"{other.path}/action", body)
    assert answer.status == 409 and b"guest agent is not enabled" in answer.body
    await other.delete()


async def test_an_interrupt_arrives(guest: Guest) -> None:
    person = guest.tenant.person
    path, body = f"{guest.path}/action", {"trigger_crash_dump": None}
    answer = await person.request("POST", path, body, {"openstack-api-version": "compute 2.17"})
    assert answer.status == 202, answer.body
    await guest.shows("NMI received for unknown reason")
    await guest.wait("ACTIVE")


async def test_a_rescue_sees_the_old_disk(guest: Guest, cloud: RealCloud, tmp_path: Path) -> None:
    boots = (await guest.log()).count("MICRONOVA-GUEST-READY")
    await guest.ssh("mount /dev/vda1 /mnt && echo important >/mnt/file && umount /mnt")
    answer = await guest.tenant.person.do("POST", f"{guest.path}/action", {"rescue": {"rescue_image_ref": cloud.image}})
    assert len(answer["adminPass"]) == 12
    await guest.wait("RESCUE")
    await guest.shows("MICRONOVA-GUEST-READY", boots + 1)
    assert await guest.ssh("mount /dev/vdb1 /mnt && cat /mnt/file && umount /mnt") == "important\n"
    assert await guest.ssh("mount /dev/vda1 /mnt; ls /mnt/file 2>&1; umount /mnt", check=False) != "/mnt/file\n"
    assert await _by_password(guest, answer["adminPass"], tmp_path)

    await guest.act("unrescue", status="ACTIVE")
    await guest.shows("MICRONOVA-GUEST-READY", boots + 2)
    assert await guest.ssh("mount /dev/vda1 /mnt && cat /mnt/file; umount /mnt; ls /dev/vdb 2>/dev/null; true") == (
        "important\n"
    )
    [folder] = [path for path in (cloud.libvirt / "instances").iterdir() if path.name == guest.id]
    assert not list(folder.glob("*rescue*"))


async def test_a_rescued_server_is_deleted_and_leaves_nothing(guest: Guest, cloud: RealCloud) -> None:
    other = await guest.tenant.boot("doomed")
    await other.ready()
    await guest.tenant.person.do("POST", f"{other.path}/action", {"rescue": None})
    await other.wait("RESCUE")
    await other.delete()

    async def gone() -> bool:
        left = await asyncio.to_thread(cloud.guest_leftovers)
        return not any(other.id in each for each in left)

    await until(gone, "all of it to be removed")
