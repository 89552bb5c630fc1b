"""The receiving end of an interface: limits how many handlers run at once, and ends them when the server stops."""

from __future__ import annotations

import abc
import asyncio
import contextvars
from typing import Protocol

from micronova.rpc.deadlines import Deadlines
from micronova.rpc.dispatch import Dispatcher, Outcome


class Delivery(Protocol):
    """A message that a server has received and that the transport still holds."""

    body: bytes
    sender: str
    received_at: float
    """When this process got the message, by its monotonic clock."""

    async def settle(self, outcome: Outcome, /) -> None:
        """Acknowledge the message or make it a dead letter, and send the reply."""
        ...

    def give_back(self) -> None:
        """Return the message to its queue, so that another server gets it."""
        ...


class Server(abc.ABC):
    """Serves one interface until it is stopped."""

    def __init__(self, dispatcher: Dispatcher, deadlines: Deadlines, prefetch: int, grace: float) -> None:
        if prefetch < 1:
            raise ValueError("a server needs a prefetch of at least 1")
        self.interface = dispatcher.interface
        self._dispatcher = dispatcher
        self._deadlines = deadlines
        self._prefetch = prefetch
        self._grace = grace
        self._running: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def running(self) -> int:
        """The number of handlers that run now."""
        return len(self._running)

    @property
    def can_take(self) -> bool:
        """Whether one more message may be taken now."""
        return len(self._running) < self._prefetch and not self._stopping

    def take(self, delivery: Delivery) -> None:
        """Start to handle a message."""
        # In an empty context: the handler must not inherit the request id and the trace of the code that runs now.
        task = asyncio.get_running_loop().create_task(self._work(delivery), context=contextvars.Context())
        self._running.add(task)

    async def stop(self, grace: float | None = None) -> None:
        """Take no more messages and let running handlers finish; cancel those that need longer than the grace time.

        Messages whose handlers were cancelled return to their queue.
        """
        self._stopping = True
        await self._detach()
        others = self._running - {asyncio.current_task()}
        if others:
            timer = self._deadlines.after(
                self._grace if grace is None else grace, lambda: [task.cancel() for task in others]
            )
            await asyncio.wait(others)
            timer.cancel()
        await self._close()

    async def _work(self, delivery: Delivery) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await delivery.settle(await self._dispatcher.run(delivery.body, delivery.sender, delivery.received_at))
        except asyncio.CancelledError:
            delivery.give_back()
        finally:
            self._running.discard(task)
            if not self._stopping:
                self._next()

    @abc.abstractmethod
    def _next(self) -> None:
        """Take the next waiting message: a handler has finished."""

    @abc.abstractmethod
    async def _detach(self) -> None:
        """Stop the flow of new messages."""

    @abc.abstractmethod
    async def _close(self) -> None:
        """Release what the server holds, after the last handler has finished."""
