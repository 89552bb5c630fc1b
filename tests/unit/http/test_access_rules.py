"""Which requests access rules allow."""

import re
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from micronova.http.access_rules import LONGEST, MOST_READ, PathPattern, allow


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("/v2.1/servers", "/v2.1/servers", True),
        ("/v2.1/servers", "/v2x1/servers", False),
        ("/v2.1/servers", "/v2.1/servers/", False),
        ("/v2.1/servers", "/v2.1/servers/1", False),
        ("/v2.1/servers/*", "/v2.1/servers/1", True),
        ("/v2.1/servers/*", "/v2.1/servers/", False),
        ("/v2.1/servers/*", "/v2.1/servers/1/ips", False),
        ("/v2.1/servers/{server_id}/ips", "/v2.1/servers/1/ips", True),
        ("/v2.1/servers/{server_id}/ips", "/v2.1/servers/1/2/ips", False),
        ("/v2.1/**", "/v2.1/servers/1/ips", True),
        ("/v2.1/**", "/v2.1/", True),
        ("/v2.1/**", "/v2/servers", False),
        ("/**/ips", "/v2.1/servers/1/ips", True),
        ("**", "", True),
        ("/a*c", "/abbc", True),
        ("/a*c", "/ac", False),
        ("/{", "/{", True),
        ("/{", "/x", False),
        ("/.*", "/.x", True),
        ("/.*", "/xy", False),
        ("/(a|b)", "/a", False),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert PathPattern(pattern).matches(path) is expected


@given(st.text("ab/*", max_size=8), st.text("ab/", max_size=8))
def test_patterns_agree_with_regular_expressions(pattern: str, path: str) -> None:
    parts = re.findall(r"\*\*+|.", pattern)
    wanted = "".join(".*" if len(part) > 1 else "[^/]+" if part == "*" else part for part in parts)
    assert PathPattern(pattern).matches(path) is (re.fullmatch(wanted, path) is not None)


def test_no_pattern_makes_a_match_slow() -> None:
    """A regular expression of this pattern would take years."""
    started = time.process_time()
    assert not PathPattern("/" + "**a" * 74).matches("/" + "a" * 70 + "b" * (LONGEST - 71))
    assert time.process_time() - started < 5
    assert not PathPattern("**").matches("a" * (LONGEST + 1))


class CountedPath(str):
    """A path that counts how many of its characters are read."""

    characters_read = 0

    def __iter__(self) -> Iterator[str]:
        for character in super().__iter__():
            self.characters_read += 1
            yield character


def test_no_number_of_rules_makes_a_request_slow() -> None:
    path = CountedPath("/" + "a" * (LONGEST - 1))
    rules = tuple(("compute", "GET", f"/**{number}") for number in range(10_000))
    assert not allow(rules, "compute", "", "GET", path)
    assert path.characters_read <= MOST_READ
    assert allow((*rules[:49], ("compute", "GET", "/**")), "compute", "", "GET", path), "50 rules are always compared"
    assert not allow((("compute", "GET", "/**"),), "compute", "", "GET", path + "a"), "longer paths are refused"


def test_a_match_ends_with_the_first_difference() -> None:
    path = CountedPath("/v2.1/servers/1")
    assert not allow((("compute", "GET", "/v2.1/images/**"),), "compute", "", "GET", path)
    assert path.characters_read == len("/v2.1/s")


def test_service_method_and_path_must_match() -> None:
    rules = (("compute", "GET", "/v2.1/servers"), ("image", "GET", "/image/v2/**"))
    assert allow(rules, "compute", "/compute", "GET", "/v2.1/servers")
    assert not allow(rules, "compute", "/compute", "POST", "/v2.1/servers")
    assert not allow(rules, "compute", "/compute", "HEAD", "/v2.1/servers")
    assert not allow(rules, "network", "/network", "GET", "/v2.1/servers")
    assert allow(rules, "image", "/image", "GET", "/v2/images"), "a path may begin with the mount"
    assert not allow(rules, "image", "/image", "GET", "/image/v2/images")
    assert not allow(rules, "compute", "/compute", "GET", "/v2/images")
    assert not allow((), "compute", "/compute", "GET", "/v2.1/servers")
