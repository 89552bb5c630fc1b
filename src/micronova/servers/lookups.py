"""What requests about servers name, looked up in the database: flavors, key pairs, hosts, availability zones."""

import sqlalchemy as sa

from micronova.db import aggregates, flavors, keypairs, services
from micronova.objects.context import RequestContext
from micronova.objects.errors import Invalid, NotFound
from micronova.objects.flavor import Flavor
from micronova.objects.service_names import COMPUTE


def flavor_for(conn: sa.Connection, context: RequestContext, flavor_id: str, *, present: str | None = None) -> Flavor:
    """Return a flavor; raise Invalid if the caller has none of that id.

    One that is disabled counts as none, as in Nova, unless it is the `present` one of the server.
    """
    missing = Invalid(f"Flavor {flavor_id} could not be found.")
    try:
        flavor = flavors.get(conn, flavor_id, None if context.is_admin else context.project_id)
    except NotFound:
        raise missing from None
    if flavor.disabled and flavor.id != present:
        raise missing
    return flavor


def public_key(conn: sa.Connection, context: RequestContext, name: str) -> str:
    """Return the public key of one of the caller's key pairs; raise Invalid if there is none of that name."""
    try:
        return keypairs.get(conn, context.user_id, name).public_key
    except NotFound:
        raise Invalid(f"Invalid key_name provided: there is no key pair {name!r} of yours.") from None


def host_exists(conn: sa.Connection, host: str) -> bool:
    """Return whether there is a compute host of that name, up or not."""
    return bool(services.list_(conn, binary=COMPUTE, host=host))


def check_host(conn: sa.Connection, host: str) -> None:
    """Raise Invalid if there is no compute host of that name."""
    if not host_exists(conn, host):
        raise Invalid(f"Compute host {host} could not be found.")


def check_zone(conn: sa.Connection, zone: str, default_zone: str) -> None:
    """Raise Invalid if an availability zone has no host in service."""
    if not aggregates.zone_is_in_service(conn, zone, default_zone):
        raise Invalid(f"The requested availability zone {zone!r} is not available.")
