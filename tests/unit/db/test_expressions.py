"""Regular expressions without backtracking: they find what Python's own find, in bounded time."""

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from micronova.db.expressions import Expression, regexp

_ATOMS = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", "[a-b0-9]", r"\d", r"\W", r"\.", r"[\s\d]", "^", "$", ""])


def _longer(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = inner.map(lambda each: f"(?:{each})")
    repeats = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "*?"])
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(group, repeats).map("".join),
        st.tuples(inner, inner).map(lambda both: f"({both[0]}|{both[1]})"),
    )


def _is_plain(pattern: str) -> bool:
    """Whether no anchor follows itself: ^^ is one ^ for Python, and nothing here."""
    return pattern.count("^") - pattern.count("[^") <= 1 and pattern.count("$") <= 1 and not _ANCHOR_REPEATS(pattern)


_ANCHOR_REPEATS = re.compile(r"[$^].*\)[*+{]").search


@given(st.recursive(_ATOMS, _longer, max_leaves=8).filter(_is_plain), st.text("abc0. ", max_size=8))
def test_they_find_what_pythons_own_find(pattern: str, text: str) -> None:
    assert Expression(pattern).found_in(text) == bool(re.search(pattern, text))


def test_many_repetitions_take_little_time() -> None:
    """Python's own engine takes 33 s for five of them, and holds its lock."""
    begin = time.process_time()
    for repeats in (5, 20, 120):
        assert not regexp("a*" * repeats + "c", "a" * 255)
        assert regexp("a*" * repeats + "c", "a" * 255 + "c")
    assert not regexp("(a|a)?" * 40 + "a" * 40 + "c", "a" * 255)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a)\1",
        "(?=a)b",
        "(?<!a)b",
        "(?i)a",
        "(?i:a)",
        r"\bname",
        "(?>a*)b",
        "a*+",
        "(",
        "*",
        "(" * 120 + ")" * 119,
        "a{1000}{1000}",
        "(a{100}){100}",
        "a{99999999999999999999}",
    ],
)
def test_what_needs_backtracking_or_is_long_is_refused(pattern: str) -> None:
    begin = time.process_time()
    with pytest.raises(ValueError):
        Expression(pattern)
    assert time.process_time() - begin < 1


def test_nothing_repeated_often_is_nothing() -> None:
    assert Expression("(){1000000000}a").found_in("xa")
    assert regexp("a", None) is None


def test_readers_share_an_expression() -> None:
    pattern = "x.*y[0-9]+.*z"
    texts = [f"x{number}y{number % 7}z{'' if number % 3 else number}" for number in range(2000)]
    wanted = [bool(re.search(pattern, text)) for text in texts]
    with ThreadPoolExecutor(8) as readers:
        found = [list(each) for each in readers.map(lambda _: [regexp(pattern, text) for text in texts], range(8))]
    assert all(each == wanted for each in found)
