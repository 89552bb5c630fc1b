"""Caches of what hosts report."""

from micronova.objects.sized_cache import SizedCache
from micronova.objects.topology import LONGEST_TOPOLOGY, HostCell, NodeTopology, decode_topology, encode


def test_the_text_that_was_not_asked_for_longest_is_dropped() -> None:
    made: list[str] = []

    def note(text: str) -> int:
        made.append(text)
        return len(text)

    cache = SizedCache(note, most=10, longest=5)
    assert [cache(text) for text in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa", "bbbb")] == [4] * 6
    assert made == ["aaaa", "bbbb", "cccc", "bbbb"] and cache.size == 8
    assert [cache("123456"), cache("123456")] == [6, 6] and made[-2:] == ["123456"] * 2 and cache.size == 8


def test_a_host_whose_topology_is_another_one_each_time_takes_no_more_memory() -> None:
    for length in (10, 100, 1000):
        for number in range(50):
            cpus = tuple(range(number, number + length))
            cells = tuple(HostCell(id=id, memory_mb=1, dedicated=cpus) for id in range(32))
            text = encode(NodeTopology(cells=cells))
            assert len(text) < LONGEST_TOPOLOGY and len(decode_topology(text).cells) == 32
            assert decode_topology.size <= 4 << 20
