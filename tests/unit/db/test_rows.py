"""The types of rows say what is in the tables."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
import sqlalchemy as sa

import micronova.db
import micronova.objects
from micronova.db import tables
from micronova.db.departures import RecordedDeparture
from micronova.db.instances import InterfacesRow, StatesRow
from micronova.db.nodes import NODES, NodeRow
from micronova.db.services import ServiceChanges, ServiceRow
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.instance import (
    FixedIPData,
    FlavorData,
    ImageData,
    InstanceChanges,
    InstanceRow,
    InstanceWithService,
    VIFData,
)
from micronova.objects.migration import MigrationChanges, MigrationRow
from micronova.objects.network import VIF, FixedIP

DOCUMENTED = re.compile(r"A row of `(\w+)`")
"""How the docstring of a row type begins."""
PARTS: dict[type, sa.Table] = {StatesRow: tables.instances, InterfacesRow: tables.instances}
"""Rows of queries that read some columns."""
JOINED: dict[type, sa.Table] = {
    NodeRow: tables.compute_nodes,
    InstanceWithService: tables.instances,
    RecordedDeparture: tables.departures,
}
"""Rows of queries that read columns of other tables, too."""


def _classes() -> Iterator[type]:
    """Return the classes of the packages that have row types."""
    for package in (micronova.db, micronova.objects):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".migrations" not in found.name:
                module = importlib.import_module(found.name)
                for _, each in inspect.getmembers(module, inspect.isclass):
                    if each.__module__ == found.name:
                        yield each


def _table_of(row: type) -> sa.Table | None:
    """Return the table that the docstring of a row type names."""
    named = DOCUMENTED.match(row.__doc__ or "")
    return None if named is None else tables.metadata.tables[named[1]]


ROWS = [(each, table) for each in _classes() if (table := _table_of(each)) is not None]
WHOLE = [(row, table) for row, table in ROWS if row not in JOINED]
READ = [*ROWS, *PARTS.items()]


def _types(hint: Any) -> set[Any]:
    """Return the types that values of a hint have."""
    if get_origin(hint) in (Union, UnionType):
        return set().union(*(_types(each) for each in get_args(hint)))
    return {type(each) for each in get_args(hint)} if get_origin(hint) is Literal else {hint}


def _names(row: object) -> str | None:
    return row.__name__ if isinstance(row, type) else None


def test_every_row_type_is_compared_with_a_table() -> None:
    named = {each for each in _classes() if each.__name__.endswith("Row")}
    assert named - {row for row, _ in ROWS} == PARTS.keys(), "its docstring begins with: A row of `TABLE`"
    assert {row: table for row, table in ROWS if row in JOINED} == JOINED
    assert len(ROWS) > 20


@pytest.mark.parametrize(("row", "table"), WHOLE, ids=_names)
def test_a_row_has_the_columns_of_its_table(row: type, table: sa.Table) -> None:
    wanted = [column.name for column in table.columns]
    required = getattr(row, "__required_keys__", None)
    if required is None:  # as a cursor returns it
        assert list(get_type_hints(row)) == wanted
    else:
        assert required == set(wanted)


@pytest.mark.parametrize(("row", "table"), JOINED.items(), ids=_names)
def test_a_row_of_a_join_has_all_columns_of_its_table(row: type, table: sa.Table) -> None:
    assert get_type_hints(row).keys() >= {column.name for column in table.columns}


@pytest.mark.parametrize(("row", "table"), PARTS.items(), ids=_names)
def test_a_part_of_a_row_has_columns_of_its_table(row: type, table: sa.Table) -> None:
    assert get_type_hints(row).keys() <= {column.name for column in table.columns}


def test_a_deleted_instance_has_the_columns_of_its_table() -> None:
    assert get_type_hints(InstanceRow).keys() == {column.name for column in tables.deleted_instances.columns}


def test_a_node_has_the_columns_of_its_query() -> None:
    assert list(get_type_hints(NodeRow)) == [column.name for column in NODES.selected_columns]


@pytest.mark.parametrize(("row", "table"), READ, ids=_names)
def test_columns_may_be_none_where_the_table_says_so(row: type, table: sa.Table) -> None:
    for name, hint in get_type_hints(row).items():
        if name in table.columns:
            assert (type(None) in _types(hint)) == table.columns[name].nullable, name


@pytest.mark.parametrize(("row", "table"), READ, ids=_names)
def test_columns_have_the_types_of_the_table(row: type, table: sa.Table) -> None:
    for name, hint in get_type_hints(row).items():
        if name in table.columns and not isinstance(table.columns[name].type, sa.JSON):
            assert _types(hint) - {type(None)} == {table.columns[name].type.python_type}, name


def test_changes_have_the_types_of_the_row() -> None:
    for row, changes in (
        (InstanceRow, InstanceChanges),
        (MigrationRow, MigrationChanges),
        (ServiceRow, ServiceChanges),
    ):
        hints = get_type_hints(row)
        assert get_type_hints(changes) == {name: hints[name] for name in get_type_hints(changes)}


@pytest.mark.parametrize(
    ("data", "struct"),
    [(FlavorData, Flavor), (ImageData, ImageMeta), (VIFData, VIF), (FixedIPData, FixedIP)],
    ids=lambda each: each.__name__,
)
def test_plain_data_has_the_fields_of_its_struct(data: type, struct: type[msgspec.Struct]) -> None:
    assert set(get_type_hints(data)) == set(struct.__struct_fields__)
