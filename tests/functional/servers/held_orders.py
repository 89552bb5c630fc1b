"""A bus that a test can let hold orders to hosts back, as the queue of a host that is cut off."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from micronova.conductor import heartbeat_transaction
from micronova.objects.context import Context
from micronova.objects.errors import Unavailable
from micronova.objects.orders import ProgressReply
from micronova.rpc.bus import Bus
from micronova.rpc.contract import Method, P, R, Target
from micronova.rpc.errors import CallTimeout
from micronova.rpc.wrapper import BusWrapper


class HoldingBus(BusWrapper):
    """Holds back the orders of one kind until it is told to release them."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus)
        self._kind: str | None = None
        self._held: list[tuple[Target, Method[Any, Any], Any, Context]] = []
        self._arrived = asyncio.Event()
        self._refused = asyncio.Event()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._delays = False
        self._late: Callable[[], Awaitable[Any]] | None = None

    async def cast(self, target: Target, method: Method[P, Any], params: P, *, context: Context) -> None:
        if self._kind is not None and getattr(params, "kind", None) == self._kind:
            self._held.append((target, method, params, context))
            self._arrived.set()
            return
        await super().cast(target, method, params, context=context)

    async def call(self, target: Target, method: Method[P, R], params: P, *, context: Context, timeout: float) -> R:
        if self._delays and method.label == "scheduler.select_destinations":
            self._delays = False
            self._late = lambda: self._bus.call(target, method, params, context=context, timeout=timeout)
            self._arrived.set()
            raise CallTimeout("The scheduler stands still.")
        asks = getattr(params, "destroys", False)
        try:
            answer = await super().call(target, method, params, context=context, timeout=timeout)
        except Unavailable:
            if asks:
                self._refused.set()
            raise
        if asks and not getattr(answer, "ask_again", False):
            self._answers.put_nowait(answer)
        return answer

    def hold(self, kind: str) -> None:
        """Hold back orders of this kind from now on."""
        self._kind = kind
        self._arrived.clear()
        self._refused.clear()
        self._answers = asyncio.Queue()

    def delay_schedule(self) -> Callable[[], Awaitable[Any]]:
        """Let the next question to a scheduler time out; return what delivers it later and returns the answer."""
        self._delays = True
        self._arrived.clear()

        async def deliver() -> Any:
            assert self._late is not None
            return await self._late()

        return deliver

    async def held(self) -> None:
        """Wait until an order is held back."""
        async with asyncio.timeout(30):
            await self._arrived.wait()

    async def refused(self) -> None:
        """Wait until a host was told not to remove its guest now."""
        async with asyncio.timeout(30):
            await self._refused.wait()

    async def asked(self) -> ProgressReply:
        """Wait until a host has asked whether its order still stands; return the answer."""
        async with asyncio.timeout(30):
            answer: ProgressReply = await self._answers.get()
        return answer

    async def release(self) -> None:
        """Deliver the orders that are held back, and all that follow."""
        self._kind, held = None, self._held
        self._held = []
        for target, method, params, context in held:
            await super().cast(target, method, params, context=context)


def no_orders_by_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let replies to heartbeats repeat no orders, so that only those that are sent arrive."""
    monkeypatch.setattr(heartbeat_transaction, "JUST_SENT", 1 << 50)
