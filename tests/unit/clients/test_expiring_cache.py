import asyncio

import pytest

from micronova.clients.expiring_cache import ExpiringCache


async def test_one_question_at_a_time_and_the_answer_is_remembered() -> None:
    asked = 0
    gate = asyncio.Event()

    async def ask() -> int:
        nonlocal asked
        asked += 1
        await gate.wait()
        return asked

    cache = ExpiringCache[str, int](60.0)
    waiting = [asyncio.create_task(cache.get("k", ask)) for _ in range(5)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*waiting[1:]) == [1] * 4
    assert await cache.get("k", ask) == 1
    assert await cache.get("other", ask) == 2


async def test_answers_grow_old_and_failures_are_not_kept() -> None:
    cache = ExpiringCache[str, int](0.0)
    cache.put("k", 1)
    assert cache.peek("k") is None

    async def fail() -> int:
        raise ValueError

    async def work() -> int:
        return 7

    with pytest.raises(ValueError):
        await cache.get("k", fail)
    assert await cache.get("k", work) == 7
