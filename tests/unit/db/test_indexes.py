"""Each index of the databases costs a write for each row, so none repeats what another key finds already."""

import pytest
import sqlalchemy as sa

from micronova.db import tables as compute
from micronova.embedded.identity import tables as identity
from micronova.embedded.image import tables as image
from micronova.embedded.network import tables as network
from micronova.embedded.volume import tables as volume

DATABASES = {"compute": compute, "identity": identity, "image": image, "network": network, "volume": volume}
TABLES = {
    f"{name} {table.name}": table for name, module in DATABASES.items() for table in module.metadata.sorted_tables
}
Key = tuple[str, tuple[str, ...], str]
"""Name, columns, and the condition of a partial index."""


def _of_index(index: sa.Index) -> Key:
    where = index.dialect_options["postgresql"].get("where")
    return str(index.name), tuple(str(each) for each in index.expressions), "" if where is None else str(where)


def _keys(table: sa.Table) -> list[Key]:
    """Return the indexes of a table, and those of its primary key and unique constraints."""
    constraints = [
        (str(each.name), tuple(str(column) for column in each.columns), "")
        for each in table.constraints
        if isinstance(each, sa.PrimaryKeyConstraint | sa.UniqueConstraint)
    ]
    return [_of_index(index) for index in table.indexes] + constraints


@pytest.mark.parametrize("name", TABLES)
def test_no_index_is_the_beginning_of_another_key(name: str) -> None:
    table = TABLES[name]
    for index in table.indexes:
        own, columns, where = _of_index(index)
        longer = [
            other
            for other, others, condition in _keys(table)
            if other != own and others[: len(columns)] == columns and condition == where
        ]
        assert index.unique or longer == [], f"{own} finds what {longer} finds"
