"""Every hostile image of the corpus through a whole cloud: refused with a reason, and never opened by QEMU's tools."""

import asyncio
from typing import Any

import pytest

from micronova.http.client import error_message
from tests.e2e.cloud import RealCloud
from tests.e2e.fault_machine import FaultMachine
from tests.e2e.guests import SERVERS, Guest, Tenant
from tests.people import Person
from tests.unit.imageformat.corpus import HOSTILE, Sample

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="session")]

AT_A_TIME = 4
UNKNOWN = "'disk_format': it must be one of"


async def _upload(person: Person, sample: Sample) -> tuple[str, str]:
    """Upload a sample; return the image's id, or why it was refused."""
    body = {"name": sample.name, "disk_format": sample.declared, "container_format": "bare"}
    json = {"accept": "application/json"}
    answer = await person.request("POST", "/image/v2/images", body, json)
    if answer.status == 201:
        image = answer.json()["id"]
        kind = {**json, "content-type": "application/octet-stream"}
        answer = await person.request("PUT", f"/image/v2/images/{image}/file", sample.content, kind)
        if answer.status == 204:
            return image, ""
        assert (await person.do("GET", f"/image/v2/images/{image}"))["status"] == "queued"
    assert 400 <= answer.status < 500, (sample, answer)
    return "", error_message(answer)


async def test_the_image_service_refuses_them(cloud: RealCloud) -> None:
    person = await cloud.person("member")
    for sample in HOSTILE:
        if not sample.content:
            continue  # no data, any format: what the snapshot of a server that boots from a volume is
        image, reason = await _upload(person, sample)
        assert not image, f"{sample} was taken"
        assert sample.word in reason or UNKNOWN in reason, (sample, reason)


async def test_a_host_refuses_them(faulty_cloud: RealCloud, fault_machine: FaultMachine) -> None:
    """The image service of this cloud lets everything through."""
    tenant = await faulty_cloud.tenant("10.81.0.0/24", router=False)
    before = fault_machine.calls()
    limit = asyncio.Semaphore(AT_A_TIME)

    async def boot(sample: Sample) -> str:
        async with limit:
            return await _boot(tenant, sample)

    outcomes = await asyncio.gather(*map(boot, HOSTILE))
    assert fault_machine.calls() == before, "QEMU's tools were let at one of them"
    # Most come as far as the host; few are of formats that no cloud boots.
    assert outcomes.count("host") > 0.8 * len(HOSTILE)

    guest = await tenant.boot("honest")
    await guest.wait("ACTIVE")
    calls = fault_machine.calls()[len(before) :]
    assert calls and all(" -f qcow2 " in f" {call} " for call in calls), calls
    await guest.delete()


async def _boot(tenant: Tenant, sample: Sample) -> str:
    """Boot a sample, which must fail; return who refused it."""
    image, reason = await _upload(tenant.person, sample)
    if not image:
        assert sample.word in reason or UNKNOWN in reason, (sample, reason)
        return "image service"
    fields: dict[str, Any] = {"name": sample.name, "imageRef": image, "flavorRef": tenant.cloud.flavor}
    answer = await tenant.person.request("POST", SERVERS, {"server": {**fields, "networks": "none"}})
    if answer.status != 202:
        assert answer.status == 400, (sample, answer)
        return "api"
    guest = Guest(tenant, answer.json()["server"]["id"], sample.name)
    fault = (await guest.wait("ERROR"))["fault"]
    refusals = (f"The image {image} is refused", sample.word), (f"The image {image} has the format", "this host boots")
    assert any(all(word in fault["message"] for word in words) for words in refusals), (sample, fault)
    await guest.delete()
    return "host"
