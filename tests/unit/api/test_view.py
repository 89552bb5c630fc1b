"""Views show each field exactly at its versions, to whom it is meant for."""

from types import SimpleNamespace

import pytest

from micronova.api.view import OMIT, Field, View
from micronova.http.versions import Range, since, until

ROW = SimpleNamespace(id=1, uuid="u", name="n", host="h")
VIEW = View(
    Field("id", "id", until(52)),
    Field("id", "uuid", since(53)),
    Field("name", "name"),
    Field("old", lambda row, context: context, Range(2, 4)),
    Field("host", "host", when="admin"),
    Field("maybe", lambda row, context: OMIT if context is None else context, optional=True),
)


def test_a_field_is_shown_at_its_versions() -> None:
    assert VIEW.at(1)(ROW) == {"id": 1, "name": "n"}
    assert VIEW.at(2)(ROW, 5) == {"id": 1, "name": "n", "old": 5, "maybe": 5}
    assert VIEW.at(5)(ROW, 5) == {"id": 1, "name": "n", "maybe": 5}
    assert VIEW.at(53)(ROW) == {"id": "u", "name": "n"}


def test_a_field_may_be_for_some_callers_only() -> None:
    assert VIEW.at(1, frozenset({"admin"}))(ROW) == {"id": 1, "name": "n", "host": "h"}


def test_versions_that_look_alike_share_one_function() -> None:
    assert VIEW.at(60) is VIEW.at(104)
    assert VIEW.at(52) is not VIEW.at(53)


def test_rows_may_be_mappings() -> None:
    view = View(Field("id", "uuid"), keyed=True)
    assert view.at(1)({"uuid": "u"}) == {"id": "u"}


def test_forms_of_a_field_must_not_overlap() -> None:
    with pytest.raises(ValueError, match="twice"):
        View(Field("id", "id", until(5)), Field("id", "uuid", since(5))).at(5)
    with pytest.raises(ValueError, match="not the name of a column"):
        View(Field("id", "id; import os")).at(1)
