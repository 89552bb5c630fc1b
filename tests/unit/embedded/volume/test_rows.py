"""The types of rows say what is in the tables."""

from typing import get_type_hints

import pytest
import sqlalchemy as sa

from micronova.embedded.volume import tables
from micronova.embedded.volume.model import (
    Attachment,
    Backup,
    Message,
    Operation,
    QosSpecs,
    QosSpecsColumns,
    ResourceColumns,
    ServiceRow,
    Snapshot,
    Transfer,
    TypeEncryption,
    TypeEncryptionColumns,
    Volume,
    VolumeType,
    VolumeTypeColumns,
)

TYPES: list[tuple[type, sa.Table, set[str]]] = [
    (Volume, tables.volumes, {"type_name", "metadata", "attachments"}),
    (Snapshot, tables.snapshots, {"metadata", "progress"}),
    (Backup, tables.backups, set()),
    (Attachment, tables.attachments, set()),
    (VolumeType, tables.volume_types, set()),
    (TypeEncryption, tables.type_encryptions, set()),
    (QosSpecs, tables.qos_specs, set()),
    (Operation, tables.operations, set()),
    (ServiceRow, tables.services, set()),
    (Transfer, tables.transfers, set()),
    (Message, tables.messages, set()),
]


@pytest.mark.parametrize(("row", "table", "more"), TYPES)
def test_a_row_has_the_columns_of_its_table(row: type, table: sa.Table, more: set[str]) -> None:
    """`more` are the fields that come from other tables."""
    hints = get_type_hints(row)
    assert set(hints) == {column.name for column in table.columns} | more
    for column in table.columns:
        assert (type(None) in getattr(hints[column.name], "__args__", ())) == column.nullable, column.name
        if not isinstance(column.type, sa.JSON):
            plain = column.type.python_type
            assert hints[column.name] in (plain, plain | None), column.name


COLUMNS: list[tuple[type, tuple[type, ...]]] = [
    (ResourceColumns, (Volume, Snapshot, Backup)),
    (VolumeTypeColumns, (VolumeType,)),
    (QosSpecsColumns, (QosSpecs,)),
    (TypeEncryptionColumns, (TypeEncryption,)),
]


@pytest.mark.parametrize(("columns", "rows"), COLUMNS)
def test_columns_that_are_set_have_the_types_of_their_rows(columns: type, rows: tuple[type, ...]) -> None:
    fields = [get_type_hints(row) for row in rows]
    for name, kind in get_type_hints(columns).items():
        wanted = [hints[name] for hints in fields if name in hints]
        assert wanted, name
        assert kind == wanted[0], name


def test_every_table_of_rows_that_are_read_whole_has_a_type() -> None:
    pairs = {"volume_metadata", "snapshot_metadata", "default_types", "volume_type_projects", "volume_connections"}
    quotas = {"quota_usages", "quota_limits", "quota_class_limits"}
    outbox = {"events"}  # `embedded.common.compute_events` has the type of its rows
    typed = {table.name for _, table, _ in TYPES}
    assert {table.name for table in tables.metadata.sorted_tables} == typed | pairs | quotas | outbox
