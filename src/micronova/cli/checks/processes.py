"""Checks of what runs and of what it has stored: heartbeats, users of hosts, versions, and the key of secrets."""

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from micronova.cli.checks.databases import free_connections
from micronova.cli.checks.shape import Check, Finding, NotAsked, Subject
from micronova.cli.names import EMBEDDED_ROLES
from micronova.cli.process_name import ONE_OF_A_NAME
from micronova.cli.region_status import SILENT_AFTER
from micronova.cli.wiring import WITH_COMPUTE_DATABASE
from micronova.db import processes, schema, services
from micronova.db.clock import now_of
from micronova.db.secrets import SecretBox, key_id
from micronova.db.tables import operations
from micronova.objects.clock import micros
from micronova.objects.errors import MicronovaError
from micronova.objects.service_names import COMPUTE, SERVICE_VERSION

ROLES = ("api", "conductor", "scheduler")
SECRET_ROLES = ("api", "conductor", "identity", "volume")
DAY = 86_400.0
MOST_NAMED = 5


def checks(subject: Subject) -> Iterator[Check]:
    """Return the checks of what runs, if there is a database to ask."""
    if subject.among(ROLES) and subject.has_database():
        yield Check("heartbeats", ("conductor",), _heartbeats, "default.service_down_time")
        yield Check("users of hosts", ("conductor",), _host_users, "conductor.require_host_users")
        yield Check("versions of services", ROLES, _versions)
        yield Check("releases of processes", ROLES, _releases)
        yield Check("connections to the database", ROLES, _connections, "database.pool_size")
        yield Check("names of processes", ("conductor", "scheduler"), _names, "default.host")
    if subject.among(SECRET_ROLES) and (
        subject.has_database() or subject.has_database("identity") or subject.has_database("volume")
    ):
        yield Check("secret key", SECRET_ROLES, _secret_key, "default.secret_key")


async def _read(subject: Subject, function: Any, *args: Any) -> Any:
    """Ask the compute database; raise NotAsked if it cannot be asked, because the check of it says why."""
    try:
        database = await subject.database()
        if not await database.read(schema.usable, "micronova.db.migrations"):
            raise NotAsked("the database does not have the schema of this release")
        return await database.read(function, *args)
    except (MicronovaError, sa.exc.SQLAlchemyError):
        raise NotAsked("the database cannot be asked, as said above") from None


async def _now(subject: Subject) -> int:
    """Return the time by which rows are dated: the clock of this machine may differ."""
    return micros(await _read(subject, now_of))


async def _heartbeats(subject: Subject) -> list[Finding]:
    from micronova.conductor.heartbeat_interval import longest_interval, too_often

    hosts = await _read(subject, services.count_up, COMPUTE, await _now(subject), DAY)
    default = subject.settings.default
    longest = longest_interval(default.service_down_time, subject.settings.conductor.lease)
    problem = too_often(hosts, report_interval=default.report_interval, longest=longest)
    if problem is None:
        return [Finding("", f"of {hosts} hosts", outcome="ok")]
    said, _, right = problem.partition(": set ")
    return [Finding("default.service_down_time", said, right)]


async def _host_users(subject: Subject) -> list[Finding]:
    """Find hosts that send heartbeats and have no broker user of their own, where that is demanded."""
    if not subject.settings.conductor.require_host_users:
        return []
    rows = await _read(subject, services.list_)
    known = (await _read(subject, services.host_users)).registered
    down = subject.settings.default.service_down_time
    now = await _now(subject)
    up = [row.host for row in rows if row.binary == COMPUTE and services.is_up(row, now, down)]
    strange = sorted(host for host in up if host not in known)
    if not strange:
        return []
    found = f"{', '.join(strange[:5])} send heartbeats and were not added: conductors refuse them"
    return [Finding("conductor.require_host_users", found, f"run `micronova host add {strange[0]}`")]


async def _versions(subject: Subject) -> list[Finding]:
    """Find conductors, schedulers and hosts of another release. They work side by side for the time of an upgrade."""
    rows = await _read(subject, services.list_)
    down, now = subject.settings.default.service_down_time, await _now(subject)
    others = [row for row in rows if services.is_up(row, now, down) and row.version != SERVICE_VERSION]
    found = []
    for version in sorted({row.version for row in others}):
        names = [f"{row.binary} on {row.host}" for row in others if row.version == version]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        said = f"{', '.join(names[:MOST_NAMED])}{more} run version {version} of services, and this release has "
        right = "upgrade them" if version < SERVICE_VERSION else "use their release of micronova"
        found.append(Finding("", f"{said}{SERVICE_VERSION}", right, "unknown"))
    return found


async def _secret_key(subject: Subject) -> list[Finding]:
    """Open a secret that another process has stored."""
    default = subject.settings.default
    own = default.secret_key or (subject.process.keys.secret_key if subject.place.has_keys() else "")
    if not own:
        return []
    key, *others = [bytes.fromhex(each) for each in (own, *default.other_secret_keys.split())]
    findings = []
    sealed = await _read(subject, _one_operation) if subject.has_database() else None
    right = "the key of the api, conductor, identity and volume processes that have stored it"
    if sealed is not None:
        try:
            SecretBox(key, others).open(sealed.secrets, sealed.id)
        except MicronovaError as error:
            findings.append(Finding("default.secret_key", error.message, right))
    if "identity" in subject.roles and subject.has_database("identity"):
        from micronova.embedded.identity.blobs import BlobBox

        database = await subject.database("identity")
        stored = await database.read(_one_credential)
        if stored is not None:
            try:
                BlobBox(key, others).open(stored.blob, stored.id)
            except MicronovaError as error:
                findings.append(Finding("default.secret_key", error.message, right))
    if "volume" in subject.roles and subject.has_database("volume"):
        from micronova.embedded.volume.backend.keys import KeyBox, SealedKey

        row = await (await subject.database("volume")).read(_one_volume_key)
        if row is not None:
            try:
                KeyBox(key, others).open(SealedKey(id=row.encryption_key_id, sealed=row.sealed_key))
            except MicronovaError as error:
                findings.append(Finding("default.secret_key", error.message, right))
    if subject.has_database():
        findings += await _other_keys(subject, key, others)
    return findings


async def _other_keys(subject: Subject, key: bytes, others: Sequence[bytes]) -> list[Finding]:
    """Find processes that run with another secret key; while it is changed, some may have the other one."""
    known, findings = {key_id(each) for each in others}, []
    for row in await _running(subject):
        if row.secret_key_id in (None, key_id(key)):
            continue
        found = f"the process {_named(row)} runs with another secret key"
        if row.secret_key_id in known:
            found = f"the process {_named(row)} still seals with a key of default.other_secret_keys"
            findings.append(Finding("default.secret_key", found, "restart it to complete the change", "unknown"))
        else:
            findings.append(Finding("default.secret_key", found, "the same key in all, then a restart"))
    return findings


async def _running(subject: Subject) -> list[processes.ProcessRow]:
    """Return the processes that have shown a sign of life lately."""
    since = await _now(subject) - micros(SILENT_AFTER)
    return [row for row in await _read(subject, processes.list_) if row.seen_at > since]


def _named(row: processes.ProcessRow) -> str:
    return f"{row.roles} on {row.host} ({row.pid})"


async def _releases(subject: Subject) -> list[Finding]:
    """Find processes of another release, such as an API. They work side by side for the time of an upgrade."""
    own = importlib.metadata.version("micronova")
    found = []
    rows = [row for row in await _running(subject) if row.release != own]
    for release in sorted({row.release for row in rows}):
        names = [_named(row) for row in rows if row.release == release]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        said = f"{', '.join(names[:MOST_NAMED])}{more} run the release {release}, and this command is of {own}"
        found.append(Finding("", said, "the same release everywhere: upgrade the older ones", "unknown"))
    return found


async def _connections(subject: Subject) -> list[Finding]:
    """Add up what all processes that run may open at the database server."""
    rows = await _running(subject)
    if not subject.settings.database.connection.startswith("postgres"):
        return []
    pool = subject.settings.database.pool_size
    wanted = sum(_most_connections(row.roles.split(), pool) for row in rows)
    free = await _read(subject, free_connections)
    if wanted <= free:
        return [Finding("", f"{len(rows)} processes may open {wanted} of {free}", outcome="ok")] if rows else []
    said = f"the {len(rows)} processes that run may open {wanted} connections, and the server has {free} for them"
    right = (
        f"max_connections = {3 * wanted // 2} or more in postgresql.conf, or {max(1, pool * free // wanted)} or less"
    )
    return [Finding("database.pool_size", said, right)]


def _most_connections(roles: Sequence[str], pool: int) -> int:
    """Return how many connections a process may have: a pool for each service, or one to say that it runs."""
    with_compute = not set(WITH_COMPUTE_DATABASE).isdisjoint(roles)
    pools = with_compute + sum(role in EMBEDDED_ROLES for role in roles)
    return pools * pool + (not with_compute)


async def _names(subject: Subject) -> list[Finding]:
    """Find conductors and schedulers that share a host name, and so a row of `openstack compute service list`."""
    places: dict[tuple[str, str], list[int]] = {}
    for row in await _running(subject):
        for role in ONE_OF_A_NAME.intersection(row.roles.split()):
            places.setdefault((role, row.host), []).append(row.pid)
    return [
        Finding(
            "default.host",
            f"{len(pids)} processes with the role {role} are called {host} ({', '.join(map(str, pids))}): they share a "
            "row of services, which stays up if one of them dies. One that was killed counts for "
            f"{SILENT_AFTER:g} seconds",
            "another name in each process, such as by MICRONOVA__DEFAULT__HOST",
            "unknown",
        )
        for (role, host), pids in sorted(places.items())
        if len(pids) > 1
    ]


def _one_operation(conn: sa.Connection) -> Any:
    stored = sa.select(operations.c.id, operations.c.secrets)
    # One that has ended has no secrets any more.
    return conn.execute(stored.where(operations.c.finished_at.is_(None), operations.c.secrets.is_not(None))).first()


def _one_volume_key(conn: sa.Connection) -> Any:
    from micronova.embedded.volume.tables import volumes

    if "sealed_key" not in {column["name"] for column in _columns(conn, "volumes")}:
        return None
    keys = sa.select(volumes.c.encryption_key_id, volumes.c.sealed_key)
    return conn.execute(keys.where(volumes.c.sealed_key.is_not(None)).limit(1)).first()


def _columns(conn: sa.Connection, table: str) -> Sequence[Mapping[str, Any]]:
    inspector = sa.inspect(conn)
    return inspector.get_columns(table) if inspector.has_table(table) else ()


def _one_credential(conn: sa.Connection) -> Any:
    from micronova.embedded.identity.tables import credentials

    if not sa.inspect(conn).has_table("credentials"):
        return None
    return conn.execute(sa.select(credentials.c.id, credentials.c.blob).limit(1)).first()
