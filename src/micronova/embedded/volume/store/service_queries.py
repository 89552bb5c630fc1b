"""The rows of the services that operators know from Cinder."""

from typing import Final

import msgspec
import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.volume.model import ServiceRow
from micronova.embedded.volume.store.resource_queries import read_one
from micronova.embedded.volume.tables import services
from micronova.objects.errors import Invalid

VOLUME_SERVICE: Final = "cinder-volume"
SCHEDULER: Final = "cinder-scheduler"
BACKUP_SERVICE: Final = "cinder-backup"


def record_alive(conn: sa.Connection, host: str, now: int) -> None:
    """Record that the services of a host are up."""
    for binary, at in ((VOLUME_SERVICE, host), (SCHEDULER, machine(host)), (BACKUP_SERVICE, machine(host))):
        row = ServiceRow(binary=binary, host=at, disabled=False, disabled_reason=None, frozen=False, seen_at=now)
        if not insert_if_absent(conn, services, msgspec.structs.asdict(row)):
            _change(conn, binary, at, seen_at=now)


def get(conn: sa.Connection, binary: str, host: str) -> ServiceRow | None:
    """Return a service, or None."""
    return read_one(conn, services.select().where(*_this(binary, host)), ServiceRow)


def rows(conn: sa.Connection) -> list[ServiceRow]:
    """Return all services."""
    found = conn.execute(services.select().order_by(services.c.binary, services.c.host))
    return [ServiceRow(**row._mapping) for row in found]


def is_disabled(conn: sa.Connection, host: str) -> bool:
    """Return whether an operator keeps new volumes from a host."""
    found = get(conn, VOLUME_SERVICE, host)
    return found is not None and found.disabled


def check_not_frozen(conn: sa.Connection, host: str) -> None:
    """Raise Invalid if an operator keeps the resources of a host as they are."""
    found = get(conn, VOLUME_SERVICE, host)
    if found is not None and found.frozen:
        raise Invalid("The storage service is frozen: its volumes, snapshots and backups stay as they are for now.")


def set_frozen(conn: sa.Connection, host: str, frozen: bool) -> bool:
    """Freeze or thaw the volume service of a host; return whether there is one."""
    return _change(conn, VOLUME_SERVICE, host, frozen=frozen)


def set_disabled(conn: sa.Connection, binary: str, host: str, disabled: bool, reason: str | None) -> bool:
    """Enable or disable a service; return whether there is one."""
    return _change(conn, binary, host, disabled=disabled, disabled_reason=reason)


def machine(host: str) -> str:
    """Return the machine of a host, which also names the back end."""
    return host.partition("@")[0]


def _change(conn: sa.Connection, binary: str, host: str, **values: str | int | None) -> bool:
    return conn.execute(services.update().where(*_this(binary, host)).values(values)).rowcount == 1


def _this(binary: str, host: str) -> tuple[sa.ColumnElement[bool], ...]:
    return services.c.binary == binary, services.c.host == host
