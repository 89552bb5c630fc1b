"""A host that asks again and again whether it may remove its guest: it cannot keep the server's other host busy."""

import asyncio
import itertools

import msgspec

from micronova.compute.rpcapi import GET_HOST_UPTIME
from micronova.conductor.manager import MOST_HOSTS_ASKED
from micronova.conductor.rpcapi import HOSTS, PROGRESS
from micronova.objects.context import Context
from micronova.objects.orders import Progress, ProgressReply
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Method, P, R, Target
from tests.functional.cloud import Caller, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.held_orders import HoldingBus

pytestmark = only_in_one_process("holds messages back")
buses: list["AskingBus"] = []


class AskingBus(HoldingBus):
    """Holds questions to hosts back, too, while `answering` is not set."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self.questions = 0
        self.answering = asyncio.Event()
        self.answering.set()

    async def call(self, target: Target, method: Method[P, R], params: P, *, context: Context, timeout: float) -> R:
        if method.label == GET_HOST_UPTIME.label:
            self.questions += 1
            await self.answering.wait()
        return await super().call(target, method, params, context=context, timeout=timeout)


def _wrap(bus: Bus) -> Bus:
    buses[:] = [AskingBus(bus)]
    return buses[0]


CLOUD = CloudOptions(hosts=2, wrap_bus=_wrap, settings={"default": {"allow_resize_to_same_host": False}})


async def test_one_host_has_few_questions_to_others_under_way(cloud: OneProcess, user: Caller) -> None:
    bus = buses[0]
    id = (await user.boot())["id"]
    source = await user.host_of(id)
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    bus.hold("confirm_resize")
    await user.act(id, "confirmResize", status=204)
    await bus.held()
    [operation] = await cloud.open_operations()
    question = Progress(
        operation_id=operation.id, epoch=operation.epoch, instance_uuid=id, host=source, task_state="", destroys=True,
        waited=0.0,
    )  # fmt: skip
    bus.answering.clear()

    async def ask() -> ProgressReply:
        return await bus.call(HOSTS.target(), PROGRESS, question, context=Context(), timeout=30.0)

    asked = [asyncio.create_task(ask()) for _ in range(5 * MOST_HOSTS_ASKED)]
    refused = [await each for each in itertools.islice(asyncio.as_completed(asked), 4 * MOST_HOSTS_ASKED)]
    assert all(reply.accepted and reply.ask_again for reply in refused)
    assert bus.questions == MOST_HOSTS_ASKED
    bus.answering.set()
    replies = await asyncio.gather(*asked)
    assert sum(not reply.ask_again for reply in replies) == MOST_HOSTS_ASKED
    later = msgspec.structs.replace(question, waited=1.0)
    reply = await bus.call(HOSTS.target(), PROGRESS, later, context=Context(), timeout=30.0)
    assert reply.accepted and not reply.ask_again
    await bus.release()
    await user.wait_for(id, "ACTIVE")
    await cloud.assert_clean()
