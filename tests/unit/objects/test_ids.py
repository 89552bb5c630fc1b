"""Ids, and the random source that they are made of."""

import os
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from micronova.objects.ids import PooledSystemRandom, new_uuid


def test_uuids_are_random_ones_and_differ() -> None:
    source = PooledSystemRandom()
    ids = {new_uuid(source) for _ in range(2000)}
    assert len(ids) == 2000
    assert {uuid.UUID(id).version for id in ids} == {4}


def test_threads_never_get_the_same_bytes() -> None:
    source = PooledSystemRandom()
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda _: [source.getrandbits(128) for _ in range(500)], range(16)))
    found = [each for some in drawn for each in some]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("bits", [0, 1, 7, 8, 53, 128, 100_000])
def test_as_many_bits_as_asked_for(bits: int) -> None:
    source = PooledSystemRandom()
    found = [source.getrandbits(bits) for _ in range(64)]
    assert all(0 <= each < 2**bits for each in found)
    if bits >= 7:
        assert max(found) >= 2 ** (bits - 2)  # the highest bits are random, too


def test_numbers_are_below_1() -> None:
    source = PooledSystemRandom()
    found = [source.random() for _ in range(1000)]
    assert 0.0 <= min(found) < 0.1 and 0.9 < max(found) < 1.0
    assert {source.choice("ab") for _ in range(100)} == {"a", "b"}


def test_a_negative_number_of_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        PooledSystemRandom().getrandbits(-1)


def test_a_forked_process_has_other_ids() -> None:
    source = PooledSystemRandom()
    source.getrandbits(8)  # now the pool is full
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, source.getrandbits(128).to_bytes(16))
        os._exit(0)
    os.waitpid(child, 0)
    of_child = int.from_bytes(os.read(reading, 16))
    os.close(reading)
    os.close(writing)
    assert of_child != source.getrandbits(128)
