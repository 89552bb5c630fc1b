"""The types of rows say what is in the tables."""

from typing import get_type_hints

import msgspec
import pytest
import sqlalchemy as sa

from micronova.db import tables
from micronova.db.aggregates import AggregateRow
from micronova.db.audits import AuditRow
from micronova.db.flavors import FlavorRow
from micronova.db.instance_actions import InstanceActionEventRow, InstanceActionRow
from micronova.db.keypairs import KeyPairRow
from micronova.db.nodes import NODES, NodeRow
from micronova.db.processes import ProcessRow
from micronova.db.server_groups import ServerGroupRow
from micronova.db.services import ServiceChanges, ServiceRow
from micronova.db.task_logs import TaskLogRow
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.instance import FixedIPData, FlavorData, ImageData, InstanceChanges, InstanceRow, VIFData
from micronova.objects.network import VIF, FixedIP
from micronova.objects.operations import OperationRow


def test_an_instance_has_the_columns_of_its_table() -> None:
    columns = {column.name for column in tables.instances.columns}
    assert InstanceRow.__required_keys__ == columns
    assert InstanceRow.__optional_keys__ | columns == {column.name for column in tables.deleted_instances.columns}
    assert InstanceChanges.__optional_keys__ <= columns


def test_an_operation_has_the_columns_of_its_table() -> None:
    assert OperationRow.__required_keys__ == {column.name for column in tables.operations.columns}


# The rows as cursors return them, with all columns of their tables.
CURSOR_ROWS: list[tuple[type, sa.Table]] = [
    (ServiceRow, tables.services),
    (ProcessRow, tables.processes),
    (AuditRow, tables.audits),
    (TaskLogRow, tables.task_logs),
    (FlavorRow, tables.flavors),
    (AggregateRow, tables.aggregates),
    (KeyPairRow, tables.key_pairs),
    (ServerGroupRow, tables.server_groups),
    (InstanceActionRow, tables.instance_actions),
    (InstanceActionEventRow, tables.instance_action_events),
]


@pytest.mark.parametrize(("row", "table"), CURSOR_ROWS)
def test_a_row_of_a_cursor_has_the_columns_of_its_table(row: type, table: sa.Table) -> None:
    assert list(get_type_hints(row)) == [column.name for column in table.columns]


def test_a_node_has_the_columns_of_its_query() -> None:
    assert list(get_type_hints(NodeRow)) == [column.name for column in NODES.selected_columns]


@pytest.mark.parametrize(
    ("row", "table"),
    [
        (InstanceRow, tables.instances),
        (OperationRow, tables.operations),
        (NodeRow, tables.compute_nodes),
        *CURSOR_ROWS,
    ],
)
def test_columns_may_be_none_where_the_table_says_so(row: type, table: sa.Table) -> None:
    hints = get_type_hints(row)
    for column in table.columns:
        assert (type(None) in getattr(hints[column.name], "__args__", ())) == column.nullable, column.name


@pytest.mark.parametrize(("row", "table"), [(NodeRow, tables.compute_nodes), *CURSOR_ROWS])
def test_columns_have_the_types_of_the_table(row: type, table: sa.Table) -> None:
    hints = get_type_hints(row)
    for column in table.columns:
        if not isinstance(column.type, sa.JSON):
            plain = column.type.python_type
            assert hints[column.name] in (plain, plain | None), column.name


def test_changes_have_the_types_of_the_row() -> None:
    for row, changes in ((InstanceRow, InstanceChanges), (ServiceRow, ServiceChanges)):
        hints = get_type_hints(row)
        assert get_type_hints(changes) == {name: hints[name] for name in get_type_hints(changes)}


@pytest.mark.parametrize(
    ("data", "struct"),
    [(FlavorData, Flavor), (ImageData, ImageMeta), (VIFData, VIF), (FixedIPData, FixedIP)],
    ids=lambda each: each.__name__,
)
def test_plain_data_has_the_fields_of_its_struct(data: type, struct: type[msgspec.Struct]) -> None:
    assert set(get_type_hints(data)) == set(struct.__struct_fields__)
