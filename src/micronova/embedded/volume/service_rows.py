"""The rows of the services that operators know from Cinder."""

from typing import Any, Final

import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.volume.tables import services
from micronova.objects.errors import Invalid

VOLUME_SERVICE: Final = "cinder-volume"
SCHEDULER: Final = "cinder-scheduler"
BACKUP_SERVICE: Final = "cinder-backup"


def ensure(conn: sa.Connection, host: str, now: int) -> None:
    """Record that the services of a host are up."""
    for binary, at in ((VOLUME_SERVICE, host), (SCHEDULER, machine(host)), (BACKUP_SERVICE, machine(host))):
        row = {
            "binary": binary,
            "host": at,
            "disabled": False,
            "disabled_reason": None,
            "frozen": False,
            "seen_at": now,
        }
        if not insert_if_absent(conn, services, row):
            this = sa.and_(services.c.binary == binary, services.c.host == at)
            conn.execute(services.update().where(this).values(seen_at=now))


def is_disabled(conn: sa.Connection, host: str) -> bool:
    """Return whether an operator keeps new volumes from a host."""
    this = sa.and_(services.c.binary == VOLUME_SERVICE, services.c.host == host)
    return bool(conn.execute(sa.select(services.c.disabled).where(this)).scalar_one_or_none())


def check_not_frozen(conn: sa.Connection, host: str) -> None:
    """Raise Invalid if an operator keeps the resources of a host as they are."""
    this = sa.and_(services.c.binary == VOLUME_SERVICE, services.c.host == host)
    if conn.execute(sa.select(services.c.frozen).where(this)).scalar_one_or_none():
        raise Invalid("The storage service is frozen: its volumes, snapshots and backups stay as they are for now.")


def set_frozen(conn: sa.Connection, host: str, frozen: bool) -> bool:
    """Freeze or thaw the volume service of a host; return whether there is one."""
    this = sa.and_(services.c.binary == VOLUME_SERVICE, services.c.host == host)
    return conn.execute(services.update().where(this).values(frozen=frozen)).rowcount == 1


def machine(host: str) -> str:
    """Return the machine of a host, which also names the back end."""
    return host.partition("@")[0]


def rows(conn: sa.Connection) -> list[sa.Row[Any]]:
    """Return all services."""
    return list(conn.execute(services.select().order_by(services.c.binary, services.c.host)))


def update(conn: sa.Connection, binary: str, host: str, disabled: bool, reason: str | None) -> bool:
    """Enable or disable a service; return whether there is one."""
    this = sa.and_(services.c.binary == binary, services.c.host == host)
    values = {"disabled": disabled, "disabled_reason": reason}
    return conn.execute(services.update().where(this).values(values)).rowcount == 1
