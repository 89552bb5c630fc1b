"""The queries about QoS specs."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common import revisions
from micronova.embedded.volume.model import QosSpecs, QosSpecsColumns
from micronova.embedded.volume.store import type_queries
from micronova.embedded.volume.store.paging import Listed, Page, list_rows
from micronova.embedded.volume.store.resource_queries import read_one
from micronova.embedded.volume.tables import qos_specs, volume_types
from micronova.objects.errors import Conflict, Invalid

SORTABLE: Mapping[str, sa.Column[Any]] = {
    name: qos_specs.c[name] for name in ("id", "name", "consumer", "created_at", "updated_at")
}


def front_end_specs(conn: sa.Connection, type_id: str) -> dict[str, str] | None:
    """Return the QoS specs of a type that the host of a server enforces; None if there are none."""
    found = type_queries.get(conn, type_id)
    specs = get(conn, found.qos_specs_id) if found is not None and found.qos_specs_id else None
    return None if specs is None or specs.consumer == "back-end" else specs.specs


def get(conn: sa.Connection, specs_id: str) -> QosSpecs | None:
    """Return QoS specs, or None."""
    return read_one(conn, qos_specs.select().where(qos_specs.c.id == specs_id), QosSpecs)


def insert(conn: sa.Connection, made: QosSpecs) -> None:
    """Write new QoS specs; raise Conflict if there are some of this name."""
    if not insert_if_absent(conn, qos_specs, msgspec.structs.asdict(made)):
        raise Conflict(f"QoS Specs {made.name} already exists.")


def list_qos_specs(conn: sa.Connection, page: Page, conditions: Sequence[sa.ColumnElement[bool]]) -> Listed[QosSpecs]:
    """Return a page of QoS specs."""
    return list_rows(conn, qos_specs.select(), QosSpecs, page, conditions)


def update(conn: sa.Connection, found: QosSpecs, values: QosSpecsColumns, now: int) -> None:
    """Change QoS specs; raise Changed if another request has changed them meanwhile."""
    revisions.update(conn, qos_specs.c.revision, found.id, found.revision, values, now)


def associated(conn: sa.Connection, specs_id: str) -> dict[str, str]:
    """Return the names of the volume types that are associated with QoS specs, by id."""
    chosen = sa.select(volume_types.c.id, volume_types.c.name).where(volume_types.c.qos_specs_id == specs_id)
    return {row.id: row.name for row in conn.execute(chosen.order_by(volume_types.c.name))}


def end_associations(conn: sa.Connection, specs_id: str, now: int) -> None:
    """End all associations of QoS specs."""
    of_specs = volume_types.c.qos_specs_id == specs_id
    revisions.touch(conn, volume_types.c.revision, of_specs, now=now, qos_specs_id=None)


def delete(conn: sa.Connection, found: QosSpecs, force: bool, now: int) -> None:
    """Delete QoS specs; raise Invalid if volume types are associated with them, unless `force` ends that."""
    if not force and associated(conn, found.id):
        raise Invalid(f"QoS Specs {found.id} is still associated with volume types: end that, or delete by force.")
    end_associations(conn, found.id, now)
    revisions.delete(conn, qos_specs.c.revision, found.id, found.revision)
