"""The connection to libvirt: what the agent is told of one that is lost."""

from typing import cast

from micronova.objects.errors import Unavailable
from micronova.virt.libvirt.client import connection
from micronova.virt.libvirt.client.binding import Connect
from micronova.virt.libvirt.client.connection import Connection
from tests.clocks import ManualClock


async def test_one_failure_to_connect_again_is_told() -> None:
    clock = ManualClock()
    told: list[str] = []
    attempts: list[int] = []

    async def prepare() -> None:
        attempts.append(len(attempts) + 1)
        raise Unavailable(f"libvirtd is away ({len(attempts)})")

    made = Connection(
        "test:///default",
        clock,
        on_event=lambda _: None,
        on_restored=lambda: None,
        on_failed=told.append,
        prepare=prepare,
    )
    made._connection = cast(Connect, object())
    made._lost(0, "closed")
    for number in (1, 2, 3):
        while len(attempts) < number:
            await clock.advance(connection.RETRY_PAUSE_MAX)
    await made.close()
    assert told == ["libvirtd is away (1)"]
