"""Holds a worker at a place where it may be slow or stand still, while others go on."""

import asyncio
from typing import Any


class Gate:
    """Blocks the first call of a function until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        self.left = asyncio.Event()

    def around(self, original: Any, fail: Exception | None = None) -> Any:
        first = True

        async def held(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            mine, first = first, False
            if not mine:
                return await original(*args, **kwargs)
            result = await original(*args, **kwargs)
            self.reached.set()
            await self.open.wait()
            self.left.set()
            if fail is not None:
                raise fail
            return result

        return held

    def before(self, original: Any) -> Any:
        """Block the first call before it does anything."""
        first = True

        async def held(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            mine, first = first, False
            if mine:
                self.reached.set()
                await self.open.wait()
            try:
                return await original(*args, **kwargs)
            finally:
                if mine:
                    self.left.set()

        return held
