"""The types of rows say what is in the tables."""

import inspect
import re
from typing import get_type_hints

import pytest
import sqlalchemy as sa

from micronova.embedded.identity import tables
from micronova.embedded.identity.store import kinds

ROWS = [
    (each, tables.metadata.tables[named[1]])
    for _, each in inspect.getmembers(kinds, inspect.isclass)
    if each.__module__ == kinds.__name__ and (named := re.match(r"A row of `(\w+)`", each.__doc__ or ""))
]


def test_every_row_type_is_compared_with_a_table() -> None:
    named = {name for name, _ in inspect.getmembers(kinds, inspect.isclass) if name.endswith("Row")}
    assert named == {row.__name__ for row, _ in ROWS}, "its docstring begins with: A row of `TABLE`"
    assert named


@pytest.mark.parametrize(("row", "table"), ROWS)
def test_a_row_has_the_columns_of_its_table(row: type, table: sa.Table) -> None:
    hints = get_type_hints(row)
    assert set(hints) == {column.name for column in table.columns}
    for column in table.columns:
        assert (type(None) in getattr(hints[column.name], "__args__", ())) == column.nullable, column.name
        if not isinstance(column.type, sa.JSON):
            plain = column.type.python_type
            assert hints[column.name] in (plain, plain | None), column.name
