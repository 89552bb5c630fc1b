"""The forms in which clients write names, numbers, flags and times."""

import pytest

from micronova.api import inputs
from micronova.objects.errors import Invalid


@pytest.mark.parametrize("value", ["a", "a b", "имя", "名前", "x" * 255, "a/b:c", "ﬁ"])
def test_good_names(value: str) -> None:
    assert inputs.name(value) == value


@pytest.mark.parametrize("value", ["", " ", " a", "a ", "a\n", "a\x00b", "a\u200bb", "a\u2028b", "\u3000a", "a\ue000"])
def test_bad_names(value: str) -> None:
    with pytest.raises(Invalid, match="name"):
        inputs.name(value)


def test_the_old_api_cut_white_space_off() -> None:
    assert inputs.name(" a ", strip=True) == "a"
    with pytest.raises(Invalid):
        inputs.name("  ", strip=True)


def test_names_of_zones_have_no_colon() -> None:
    with pytest.raises(Invalid, match="except :"):
        inputs.name("a:b", "availability_zone", forbidden=":")


def test_flags() -> None:
    assert all(inputs.flag(value) for value in (True, "True", "1", "on", "yes"))
    assert not any(inputs.flag(value) for value in (False, "False", "0", "off", "no"))
    assert inputs.boolean(" T ", "x") and not inputs.boolean("n", "x")
    with pytest.raises(Invalid, match="with_servers"):
        inputs.boolean("maybe", "with_servers")


def test_numbers() -> None:
    assert inputs.whole("5", "x") == inputs.whole(5, "x") == 5
    for bad in (-1, "-1", 2**31, "99999999999999999999"):
        with pytest.raises(Invalid, match="x"):
            inputs.whole(bad, "x")
    assert inputs.numeric_id("12") == 12
    assert [inputs.numeric_id(bad) for bad in ("", "-1", "1.5", "٣", "9999999999", "x")] == [None] * 6


def test_uuids() -> None:
    assert inputs.is_uuid("0b2a6c0e-8f36-4c0f-9d5e-1f2a3b4c5d6e")
    assert inputs.is_uuid("0B2A6C0E8F364C0F9D5E1F2A3B4C5D6E")
    assert not inputs.is_uuid("1") and not inputs.is_uuid("x" * 36) and not inputs.is_uuid("")


def test_times() -> None:
    assert inputs.moment("2020-01-01T00:00:00Z", "t") == inputs.moment("2020-01-01T01:00:00+01:00", "t")
    assert inputs.moment("2020-01-01T00:00:00", "t") == 1_577_836_800_000_000
    for bad in ("", "yesterday", "2020-13-01", "9999999"):
        with pytest.raises(Invalid, match="changes-since"):
            inputs.moment(bad, "changes-since")
