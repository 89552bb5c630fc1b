"""The first domain, roles, projects, users and catalog of a cloud. It can run at every start."""

from collections.abc import Collection, Iterator, Mapping

import sqlalchemy as sa

from micronova.db import schema
from micronova.embedded.identity.attributes import (
    INTERFACES,
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
from micronova.embedded.identity.core import DEFAULT_DOMAIN, Core
from micronova.embedded.identity.endpoint_urls import PUBLIC_URL
from micronova.embedded.identity.store import catalog, domains, grants, projects, roles, users
from micronova.embedded.identity.store.grants import SYSTEM, Grant
from micronova.embedded.identity.store.kinds import DOMAINS, ENDPOINTS, REGIONS, SERVICES
from micronova.embedded.identity.store.revocations import RevocationTime, revoke
from micronova.embedded.identity.tables import endpoints, services
from micronova.embedded.identity.tables import users as users_table
from micronova.http import revocation_subjects
from micronova.http.revocation_subjects import Subject

SERVICE_USER = "micronova"

FIRST_ROLES = ("reader", "member", "manager", "admin", "service")
FIRST_IMPLICATIONS = (("admin", "manager"), ("manager", "member"), ("member", "reader"))
FIRST_PROJECTS = {
    "admin": "Where the administrator works.",
    "demo": "A project to try things in.",
    "service": "The services themselves.",
}
FIRST_GRANTS = (  # user, target, its name, role
    ("admin", "project", "admin", "admin"),
    ("admin", SYSTEM, SYSTEM, "admin"),
    ("demo", "project", "demo", "member"),
)
SERVICE_NAMES = {
    "identity": "keystone",
    "compute": "nova",
    "image": "glance",
    "network": "neutron",
    "placement": "placement",
    "block-storage": "cinder",
    "volumev3": "cinderv3",
}


async def bootstrap(
    core: Core,
    passwords: Mapping[str, str],
    urls: Mapping[str, str],
    region: str,
    *,
    service_user: str = SERVICE_USER,
    reset: bool = False,
) -> None:
    """Create what is missing, in one transaction.

    A user that exists keeps its password unless `reset` is true. Only the service user always gets the given
    password, because it comes from the deployment's settings. If these name another one, the one before keeps its
    password, so that processes with the settings of before can go on.
    """
    stored = await core.database.read(_hashes)
    hashes: dict[str, str] = {}
    for name, password in passwords.items():
        known = stored.get(name)
        wrong = name == service_user and known and not await core.passwords.check(known, password)
        if known is None or wrong or reset:
            hashes[name] = await core.passwords.hash(password)
    ids = [core.new_id() for _ in range(64)]
    await core.write_revoking(_write, hashes, stored.keys(), dict(urls), region, service_user, ids)


def _hashes(conn: sa.Connection) -> dict[str, str | None]:
    chosen = sa.select(users_table.c.name, users_table.c.password_hash).where(users_table.c.domain_id == DEFAULT_DOMAIN)
    return {row.name: row.password_hash for row in conn.execute(chosen)}


def _write(
    conn: sa.Connection,
    time: RevocationTime,
    hashes: Mapping[str, str],
    known: Collection[str],
    urls: Mapping[str, str],
    region: str,
    service_user: str,
    ids: list[str],
) -> tuple[None, list[Subject]]:
    schema.exclusively(conn)  # workers start together
    new_ids = iter(ids)
    now = time.at
    if DOMAINS.find(conn, DEFAULT_DOMAIN) is None:
        domains.create(conn, DEFAULT_DOMAIN, DomainAttributes(name="Default", description="The first domain."), {}, now)
    role_ids: dict[str, str] = {}
    for name in FIRST_ROLES:
        role = roles.by_name(conn, name)
        if role is None:
            # Immutable, because the policies of all services rely on these names.
            attributes = RoleAttributes(name=name, options=ResourceOptions(immutable=True))
            role = roles.create(conn, next(new_ids), attributes, {}, now)
        role_ids[name] = role["id"]
    for prior, implied in FIRST_IMPLICATIONS:
        roles.imply(conn, role_ids[prior], role_ids[implied])
    target_ids = {SYSTEM: SYSTEM}
    for name, description in FIRST_PROJECTS.items():
        project = projects.by_name(conn, DEFAULT_DOMAIN, name)
        if project is None:
            project_attributes = ProjectAttributes(name=name, description=description, domain_id=DEFAULT_DOMAIN)
            project = projects.create(conn, next(new_ids), project_attributes, {}, now)
        target_ids[name] = project["id"]
    revoked: list[Subject] = []
    created: set[str] = set()
    for name, password_hash in hashes.items():
        user = users.by_name(conn, DEFAULT_DOMAIN, name)
        if user is None:
            # Without lockout: wrong passwords must not keep the cloud's own services from working.
            options = UserOptions(ignore_lockout_failure_attempts=True) if name == service_user else UserOptions()
            user_attributes = UserAttributes(name=name, domain_id=DEFAULT_DOMAIN, options=options)
            users.create(conn, next(new_ids), user_attributes, password_hash, {}, now)
            created.add(name)
        elif name in known:  # else another process has just created it
            conn.execute(users_table.update().where(users_table.c.id == user["id"]).values(password_hash=password_hash))
            revoked.append(revocation_subjects.user(user["id"]))
    for name, target, target_name, role_name in (*FIRST_GRANTS, (service_user, "project", "service", "service")):
        user = users.by_name(conn, DEFAULT_DOMAIN, name)
        # Only new users and the service user get roles: a role that an administrator has revoked stays revoked.
        if user is not None and (name in created or name == service_user):
            grant = Grant("user", user["id"], target, target_ids[target_name], role_ids[role_name])
            grants.add(conn, grant)
    _catalog(conn, urls, region, now, new_ids)
    return None, revoke(conn, time, revoked)


def _catalog(conn: sa.Connection, urls: Mapping[str, str], region: str, now: int, new_ids: Iterator[str]) -> None:
    """Create the missing services and endpoints; update the URLs of endpoints of this cloud, and of no others."""
    if REGIONS.find(conn, region) is None:
        catalog.create_region(conn, region, RegionAttributes(), {}, now)
    # Lists are sorted by time: times one microsecond apart keep this order.
    for order, (service_type, given) in enumerate(urls.items()):
        url = given if "://" in given else PUBLIC_URL + given  # a path is below the URL of the cloud
        service = SERVICES.first(conn, services.c.type == service_type)
        if service is None:
            attributes = ServiceAttributes(type=service_type, name=SERVICE_NAMES.get(service_type, service_type))
            service = catalog.create_service(conn, next(new_ids), attributes, {}, now + order)
        for step, interface in enumerate(INTERFACES):
            endpoint = ENDPOINTS.first(
                conn,
                endpoints.c.service_id == service["id"],
                endpoints.c.interface == interface,
                endpoints.c.region_id == region,
            )
            if endpoint is None:
                catalog.create_endpoint(
                    conn,
                    next(new_ids),
                    EndpointAttributes(service_id=service["id"], interface=interface, url=url, region_id=region),
                    {},
                    now + 3 * order + step,
                )
            elif endpoint["url"] != url and endpoint["url"].startswith(PUBLIC_URL):
                conn.execute(endpoints.update().where(endpoints.c.id == endpoint["id"]).values(url=url))
