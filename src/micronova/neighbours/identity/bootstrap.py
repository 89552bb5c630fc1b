"""What every cloud begins with: a domain, roles, projects, users and the catalog. Safe to run at each start."""

from collections.abc import Iterator, Mapping

import sqlalchemy as sa

from micronova.neighbours.identity.attributes import (
    DomainAttributes,
    EndpointAttributes,
    ProjectAttributes,
    RegionAttributes,
    ResourceOptions,
    RoleAttributes,
    ServiceAttributes,
    UserAttributes,
    UserOptions,
)
from micronova.neighbours.identity.catalog import PUBLIC_URL
from micronova.neighbours.identity.core import DEFAULT_DOMAIN, Core
from micronova.neighbours.identity.store import assignments, catalog, domains, projects, roles, rows, users
from micronova.neighbours.identity.store.assignments import SYSTEM, Grant
from micronova.neighbours.identity.store.revocations import Moment, void
from micronova.neighbours.identity.store.rows import Row
from micronova.neighbours.identity.tables import domains as domains_table
from micronova.neighbours.identity.tables import endpoints, regions, services
from micronova.neighbours.identity.tables import users as users_table

SERVICE_USER = "micronova"

ROLES = ("reader", "member", "manager", "admin", "service")
IMPLIED = (("admin", "manager"), ("manager", "member"), ("member", "reader"))
PROJECTS = {
    "admin": "Where the administrator works.",
    "demo": "A project to try things in.",
    "service": "The services themselves.",
}
GRANTS = (  # user, target, its name, role
    ("admin", "project", "admin", "admin"),
    ("admin", SYSTEM, SYSTEM, "admin"),
    ("demo", "project", "demo", "member"),
    (SERVICE_USER, "project", "service", "service"),
)
NAMES = {
    "identity": "keystone",
    "compute": "nova",
    "image": "glance",
    "network": "neutron",
    "placement": "placement",
    "block-storage": "cinder",
    "volumev3": "cinderv3",
}


async def bootstrap(
    core: Core, passwords: Mapping[str, str], endpoints: Mapping[str, str], region: str, reset: bool = False
) -> None:
    """Make what is missing, in one transaction.

    A user that exists keeps its password, unless `reset` is asked for. The service user is the exception: its
    password is the deployment's own, and follows what the deployment says.
    """
    stored = await core.read(_hashes)
    hashes: dict[str, str] = {}
    for name, password in passwords.items():
        known = stored.get(name)
        wrong = name == SERVICE_USER and known and not await core.passwords.check(known, password)
        if known is None or wrong or reset:
            hashes[name] = await core.passwords.hash(password)
    moment = core.moment()
    ids = [core.new_id() for _ in range(64)]
    core.apply(await core.write(_write, hashes, dict(endpoints), region, moment, ids), moment)


def _hashes(conn: sa.Connection) -> dict[str, str | None]:
    chosen = sa.select(users_table.c.name, users_table.c.password_hash).where(users_table.c.domain_id == DEFAULT_DOMAIN)
    return {row.name: row.password_hash for row in conn.execute(chosen)}


def _write(
    conn: sa.Connection,
    hashes: Mapping[str, str],
    wanted: Mapping[str, str],
    region: str,
    moment: Moment,
    ids: list[str],
) -> list[str]:
    fresh = iter(ids)
    now = moment.at
    if rows.find(conn, domains_table, DEFAULT_DOMAIN) is None:
        domains.create(conn, DEFAULT_DOMAIN, DomainAttributes(name="Default", description="The first domain."), {}, now)
    role_ids: dict[str, str] = {}
    for name in ROLES:
        role = roles.by_name(conn, name)
        if role is None:
            # Immutable as elsewhere: policies of all services rely on these names.
            attributes = RoleAttributes(name=name, options=ResourceOptions(immutable=True))
            role = roles.create(conn, next(fresh), attributes, {}, now)
        role_ids[name] = role["id"]
    for prior, implied in IMPLIED:
        roles.imply(conn, role_ids[prior], role_ids[implied])
    target_ids = {SYSTEM: SYSTEM}
    for name, description in PROJECTS.items():
        project = projects.by_name(conn, DEFAULT_DOMAIN, name)
        if project is None:
            project_attributes = ProjectAttributes(name=name, description=description, domain_id=DEFAULT_DOMAIN)
            project = projects.create(conn, next(fresh), project_attributes, {}, now)
        target_ids[name] = project["id"]
    voided: list[str] = []
    made: set[str] = set()
    for name, password_hash in hashes.items():
        user = users.by_name(conn, DEFAULT_DOMAIN, name)
        if user is None:
            # Wrong passwords must not keep the cloud's own services from working.
            options = UserOptions(ignore_lockout_failure_attempts=True) if name == SERVICE_USER else UserOptions()
            user_attributes = UserAttributes(name=name, domain_id=DEFAULT_DOMAIN, options=options)
            users.create(conn, next(fresh), user_attributes, password_hash, {}, now)
            made.add(name)
        else:
            conn.execute(users_table.update().where(users_table.c.id == user["id"]).values(password_hash=password_hash))
            voided.append(f"user:{user['id']}")
    for name, target, target_name, role_name in GRANTS:
        user = users.by_name(conn, DEFAULT_DOMAIN, name)
        # What an administrator has taken away stays away: only users made just now, and the services', get roles.
        if user is not None and (name in made or name == SERVICE_USER):
            grant = Grant("user", user["id"], target, target_ids[target_name], role_ids[role_name])
            assignments.add(conn, grant)
    _catalog(conn, wanted, region, now, fresh)
    return void(conn, moment, voided)


def _catalog(conn: sa.Connection, wanted: Mapping[str, str], region: str, now: int, fresh: Iterator[str]) -> None:
    """Put each service into the catalog; endpoints of ours follow what this version says, others are left alone."""
    if rows.find(conn, regions, region) is None:
        catalog.create_region(conn, region, RegionAttributes(), {}, now)
    # Times that differ by microseconds keep the order in which lists show them.
    for order, (kind, path) in enumerate(wanted.items()):
        url = path if "://" in path else PUBLIC_URL + path
        service: Row | None = conn.execute(services.select().where(services.c.type == kind)).mappings().first()
        if service is None:
            attributes = ServiceAttributes(type=kind, name=NAMES.get(kind, kind))
            service = catalog.create_service(conn, next(fresh), attributes, {}, now + order)
        for step, interface in enumerate(("public", "internal", "admin")):
            chosen = endpoints.select().where(
                endpoints.c.service_id == service["id"],
                endpoints.c.interface == interface,
                endpoints.c.region_id == region,
            )
            endpoint = conn.execute(chosen).mappings().first()
            if endpoint is None:
                catalog.create_endpoint(
                    conn,
                    next(fresh),
                    EndpointAttributes(service_id=service["id"], interface=interface, url=url, region_id=region),
                    {},
                    now + 3 * order + step,
                )
            elif endpoint["url"] != url and endpoint["url"].startswith(PUBLIC_URL):
                conn.execute(endpoints.update().where(endpoints.c.id == endpoint["id"]).values(url=url))
