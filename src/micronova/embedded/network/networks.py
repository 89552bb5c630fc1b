"""The network API, and the segments of networks."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import sqlalchemy as sa
from msgspec import UNSET, Meta, UnsetType

from micronova.db.upsert import insert_if_absent
from micronova.embedded.common import revisions
from micronova.embedded.common.revisions import Changed
from micronova.embedded.network import device_owners
from micronova.embedded.network.address_scopes import scopes_of
from micronova.embedded.network.collection import (
    Creatable,
    Deletable,
    Resource,
    Updatable,
    set_tags,
    standard_values,
    tags_of,
)
from micronova.embedded.network.core import NetworkServiceSettings
from micronova.embedded.network.errors import conflict, invalid
from micronova.embedded.network.host_changes import note, topics_of_groups, topics_of_ports
from micronova.embedded.network.listing import Attributes, Clause
from micronova.embedded.network.qos_use import check_network_change, check_use, default_qos_policy
from micronova.embedded.network.quotas import charge, charge_unchecked, release_all
from micronova.embedded.network.request_bodies import (
    Body,
    Domain,
    Flag,
    Identifier,
    Name,
    Number,
    Project,
    ShortText,
    Tags,
    body_of_one,
    body_of_one_or_many,
    convert_text,
    project_of,
    zone_hints,
)
from micronova.embedded.network.row_types import NetworkRow
from micronova.embedded.network.rows import NewNetwork, locked, new_row
from micronova.embedded.network.sharing import (
    ALL,
    EXTERNAL,
    NETWORK,
    NOBODY,
    SHARED,
    Use,
    check_still_shared,
    dependent_projects,
    own_or_shared,
    remove_rbac_policies,
    stop_sharing_with_all,
)
from micronova.embedded.network.tables import (
    addresses,
    floatingips,
    networks,
    ports,
    rbac_policies,
    routers,
    subnets,
    tags,
    topologies,
)
from micronova.embedded.network.topics import network_topic
from micronova.http.request import Request

SEGMENTS = {"vxlan": (1, 16_777_215), "geneve": (1, 16_777_215), "gre": (1, 2**31 - 1)}
OVERHEAD = {"vxlan": 50, "geneve": 58, "gre": 42}
AUTOMATIC_OWNERS = (device_owners.DHCP,)  # ports that do not keep a network from being deleted

PUBLIC_PHYSICAL_NETWORK = "public"
"""The one physical network: what the first external network of a cloud is on."""

NetworkType = Literal["flat", "geneve", "gre", "local", "vlan", "vxlan"]

_RENAME = {
    "router_external": "router:external",
    "provider_network_type": "provider:network_type",
    "provider_physical_network": "provider:physical_network",
    "provider_segmentation_id": "provider:segmentation_id",
}
_FLAGS = ("admin_state_up", "shared", "router:external", "is_default", "port_security_enabled")


class NetworkUpdate(Body, kw_only=True, rename=_RENAME):
    """The attributes that an update may set."""

    description: Name | UnsetType = UNSET
    name: Name | UnsetType = UNSET
    admin_state_up: Flag | UnsetType = UNSET
    shared: Flag | UnsetType = UNSET
    router_external: Flag | UnsetType = UNSET
    is_default: Flag | UnsetType = UNSET
    port_security_enabled: Flag | UnsetType = UNSET
    mtu: Number | UnsetType = UNSET
    dns_domain: Domain | UnsetType = UNSET
    qos_policy_id: Identifier | None | UnsetType = UNSET


class NetworkCreate(NetworkUpdate, kw_only=True, rename=_RENAME):
    """The attributes that a create may set."""

    project_id: Project | UnsetType = UNSET
    tenant_id: Project | UnsetType = UNSET
    tags: Tags | UnsetType = UNSET
    availability_zone_hints: Annotated[list[Name], Meta(max_length=10)] | UnsetType = UNSET
    provider_network_type: NetworkType | UnsetType = UNSET
    provider_physical_network: ShortText | None | UnsetType = UNSET
    provider_segmentation_id: Number | None | UnsetType = UNSET


class Networks(Creatable[NetworkRow], Updatable[NetworkRow], Deletable[NetworkRow]):
    """The network API."""

    singular = "network"
    plural = "networks"
    slug = "networks"
    attributes = Attributes.standard(
        networks,
        *("name", "status", "mtu", "admin_state_up", "shared", "is_default", "dns_domain"),
        *("port_security_enabled", "qos_policy_id"),
        renamed={
            "router:external": networks.c.external,
            "provider:network_type": networks.c.network_type,
            "provider:physical_network": networks.c.physical_network,
            "provider:segmentation_id": networks.c.segmentation_id,
        },
        special={
            "subnets": lambda values: networks.c.id.in_(
                sa.select(subnets.c.network_id).where(subnets.c.id.in_(values))
            ),
        },
    )
    create_body = body_of_one_or_many("network", "networks", NetworkCreate)
    update_body = body_of_one("network", NetworkUpdate)
    defaults = {"shared": False, "router:external": False, "is_default": False, "port_security_enabled": True}
    object_type = NETWORK

    def visible_rows(self, request: Request) -> Clause | None:
        """Limit callers to their own networks and those that are shared with them, also as external ones."""
        if self.crosses_projects(request):
            return None
        return own_or_shared(NETWORK, request.context.project_id, (SHARED, EXTERNAL))

    def resources(self, conn: sa.Connection, rows: Sequence[NetworkRow]) -> list[Resource]:
        """Return networks with the ids of their subnets."""
        ids = [row.id for row in rows]
        tagged, access = tags_of(conn, ids), self.access_to(conn, rows)
        below: dict[str, list[str]] = {}
        statement = sa.select(subnets.c.id, subnets.c.network_id).order_by(subnets.c.created_at, subnets.c.id)
        # A list of all is cheaper to read completely than by long IN lists.
        if len(ids) <= 100:
            statement = statement.where(subnets.c.network_id.in_(ids))
        for row in conn.execute(statement):
            below.setdefault(row.network_id, []).append(row.id)
        scopes = scopes_of(conn, ids)
        return [
            Resource(
                _values(row, below.get(row.id, []), tagged, scopes.get(row.id, {})),
                {"project_id": row.project_id, "shared": False, "router:external": False},
                access.get(row.id, NOBODY),
            )
            for row in rows
        ]

    async def create(self, request: Request) -> dict[str, Any]:
        """Create networks, each on its own segment."""
        wanted: list[tuple[NewNetwork, dict[str, Any]]] = []
        relies_on: list[Use] = []
        for given in self.given(request):
            convert_text(given, _FLAGS, ("mtu", "provider:segmentation_id"))
            project = project_of(given, request.context, self.crosses_projects(request))
            target = {
                "project_id": project,
                "shared": given.get("shared", False),
                "router:external": given.get("router:external", False),
            }
            request.authorize(target)
            self.check_fields(request, "create", given, target)
            relies_on += await self.core.database.read(check_use, request, given)
            wanted.append((self.row(project, given), given))
        return self.answer(request, await self.core.database.write(self._insert, wanted, relies_on))

    def row(self, project: str, given: dict[str, Any]) -> NewNetwork:
        """Return the row of a new network."""
        settings = self.core.settings
        kind, physical_network, segment = _segment(given, settings)
        return {
            **new_row(self.core, project, given, revision=1),
            "name": given.get("name", ""),
            "admin_state_up": given.get("admin_state_up", True),
            "status": "ACTIVE",
            "shared": given.get("shared", False),
            "external": given.get("router:external", False),
            "is_default": given.get("is_default", False),
            "port_security_enabled": given.get("port_security_enabled", True),
            "mtu": _mtu(given, kind, settings),
            "dns_domain": given.get("dns_domain", ""),
            "network_type": kind,
            "physical_network": physical_network,
            "segmentation_id": segment,
            "availability_zone_hints": zone_hints(given, settings.availability_zone),
            "qos_policy_id": given.get("qos_policy_id"),
        }

    def _insert(
        self, conn: sa.Connection, wanted: list[tuple[NewNetwork, dict[str, Any]]], relies_on: list[Use]
    ) -> list[Resource]:
        made = self.insert(conn, wanted)
        check_still_shared(conn, relies_on)
        return made

    def insert(self, conn: sa.Connection, wanted: list[tuple[NewNetwork, dict[str, Any]]]) -> list[Resource]:
        """Insert networks, each on the requested segment or on a free one."""
        new_rbac_policies: Counter[str] = Counter()
        for row, given in wanted:
            if row["is_default"]:
                _only_default(conn, row["id"], row["external"])
            if "qos_policy_id" not in given:
                row["qos_policy_id"] = default_qos_policy(conn, row["project_id"])
            # Concurrent creates may choose the same segment: a unique index decides, and the other tries the next one.
            for segment in _free_segments(conn, row):
                # The row stays as it is, because a transaction that runs again has to choose again.
                if insert_if_absent(conn, networks, {**row, "segmentation_id": segment}):
                    break
            else:
                raise _no_segment(row)
            if given.get("tags"):
                set_tags(conn, row["id"], given["tags"])
            for action in [*([SHARED] if row["shared"] else ()), *([EXTERNAL] if row["external"] else ())]:
                new_rbac_policies[row["project_id"]] += self.share(conn, row["id"], row["project_id"], action)
        for project, count in sorted(Counter(row["project_id"] for row, _ in wanted).items()):
            charge(conn, project, "network", self.core.settings.quotas, count)
            charge_unchecked(conn, project, "rbac_policy", new_rbac_policies[project])
        return self.reload_all(conn, [row["id"] for row, _ in wanted])

    async def update(self, request: Request, id: str) -> dict[str, Any]:
        """Update a network."""
        resource = await self.find_to(request, "update", id)
        [given] = self.given(request)
        convert_text(given, _FLAGS, ("mtu",))
        self.check_fields(request, "update", given, resource.target)
        if "mtu" in given:
            _mtu(given, resource.values["provider:network_type"], self.core.settings)
        relies_on = await self.core.database.read(check_use, request, given, resource.values["qos_policy_id"])
        revision = resource.values["revision_number"]
        changed = await self.core.write_and_wake(self._change, id, revision, given, relies_on, self.core.now())
        return {self.singular: self.view(request, changed)}

    def _change(
        self, conn: sa.Connection, id: str, revision: int, given: dict[str, Any], relies_on: list[Use], now: int
    ) -> Resource:
        names = {"router:external": "external"}
        values = {names.get(k, k): v for k, v in given.items()}
        row = locked(conn, networks, id)  # no new port relies on what is taken back here
        if row.revision != revision:
            raise Changed
        if values.get("shared") is False:
            _check_unshared(conn, row)
        if row.external and values.get("external") is False:
            _check_not_external(conn, row)
        if values.get("is_default"):
            _only_default(conn, id, values.get("external", row.external))
        if "qos_policy_id" in values:
            check_network_change(conn, id, row.qos_policy_id, values["qos_policy_id"])
        revisions.update(conn, networks.c.revision, id, revision, values, now)
        check_still_shared(conn, relies_on)
        note(conn, now, [network_topic(id)])
        self._change_rbac_policies(conn, row, values.get("shared"), values.get("external"))
        return self.reload(conn, id)

    def _change_rbac_policies(
        self, conn: sa.Connection, row: NetworkRow, shared: bool | None, external: bool | None
    ) -> None:
        """Add or remove what shares a network with all projects; one that is not external has no such RBAC policies."""
        added, gone = 0, []
        if shared:
            added += self.share(conn, row.id, row.project_id, SHARED)
        elif shared is False:
            gone += stop_sharing_with_all(conn, NETWORK, row.id)
        if external and not row.external:
            added += self.share(conn, row.id, row.project_id, EXTERNAL)
        elif external is False:
            gone += remove_rbac_policies(conn, NETWORK, row.id, rbac_policies.c.action == EXTERNAL)
        release_all(conn, gone)
        charge_unchecked(conn, row.project_id, "rbac_policy", added)

    async def delete(self, request: Request, id: str) -> None:
        """Delete a network that no port uses."""
        await self.find_to(request, "delete", id)
        await self.core.write_and_wake(self.delete_network, id)

    def delete_network(self, conn: sa.Connection, id: str) -> None:
        """Delete a network with its subnets, unless a port uses it."""
        # The lock keeps new ports and subnets out.
        row: NetworkRow = locked(conn, networks, id)
        # Floating IPs without a port are deleted with the network; those with one conflict below.
        f = floatingips.c
        idle = conn.execute(
            floatingips.delete()
            .where(f.floating_network_id == id, f.port_id.is_(None))
            .returning(f.id, f.project_id, f.floating_port_id)
        ).all()
        used = sa.select(ports.c.id).where(
            ports.c.network_id == id,
            ports.c.device_owner.not_in(AUTOMATIC_OWNERS),
            ports.c.id.not_in([each.floating_port_id for each in idle]),
        )
        if conn.execute(used.limit(1)).first() is not None:
            raise conflict(
                f"Unable to complete operation on network {id}. There are one or more ports still in use on the "
                f"network.",
                "NetworkInUse",
            )
        columns = (ports.c.id, ports.c.project_id, ports.c.host, ports.c.device_owner, ports.c.device_id)
        gone = list(conn.execute(sa.select(*columns).where(ports.c.network_id == id)))
        below = list(conn.execute(sa.select(subnets.c.id, subnets.c.project_id).where(subnets.c.network_id == id)))
        conn.execute(topologies.delete().where(topologies.c.network_id == id))
        topics = {network_topic(id)}
        if gone:
            ids = [each.id for each in gone]
            topics |= topics_of_ports(*(dict(each._mapping) for each in gone)) | topics_of_groups(conn, ids)
            conn.execute(addresses.delete().where(addresses.c.port_id.in_(ids)))
            conn.execute(ports.delete().where(ports.c.id.in_(ids)))
        conn.execute(subnets.delete().where(subnets.c.network_id == id))
        conn.execute(networks.delete().where(networks.c.id == id))
        conn.execute(tags.delete().where(tags.c.resource_id.in_([id, *(each.id for each in (*gone, *below, *idle))])))
        removed = remove_rbac_policies(conn, NETWORK, id)
        note(conn, self.core.now(), topics)
        freed: dict[str, Sequence[Any]] = {"port": gone, "subnet": below, "floatingip": idle, "network": [row]}
        release_all(conn, [*removed, *((each.project_id, kind) for kind, all_ in freed.items() for each in all_)])


def _values(
    row: NetworkRow, below: list[str], tagged: dict[str, list[str]], scopes: Mapping[int, str]
) -> dict[str, Any]:
    return {
        **standard_values(row, tagged),
        "name": row.name,
        "admin_state_up": row.admin_state_up,
        "status": row.status,
        "subnets": below,
        "shared": False,  # `collection.seen_by` sets it: whether it is shared with the caller's project
        "router:external": row.external,
        "is_default": row.is_default,
        "port_security_enabled": row.port_security_enabled,
        "mtu": row.mtu,
        "dns_domain": row.dns_domain,
        "qos_policy_id": row.qos_policy_id,
        "ipv4_address_scope": scopes.get(4),
        "ipv6_address_scope": scopes.get(6),
        "availability_zone_hints": row.availability_zone_hints,
        "availability_zones": [],
        "provider:network_type": row.network_type,
        "provider:physical_network": row.physical_network or None,
        "provider:segmentation_id": row.segmentation_id or None,
    }


def _segment(given: dict[str, Any], settings: NetworkServiceSettings) -> tuple[str, str, int | None]:
    """Return type, physical network and segment of a network; the segment is None if one has to be chosen."""
    kind = given.get("provider:network_type")
    physical_network = given.get("provider:physical_network") or ""
    segment = given.get("provider:segmentation_id")
    if kind is None:
        if physical_network or segment is not None:
            raise invalid("provider:network_type is required when another provider attribute is given.")
        return settings.tenant_network_type, "", None
    if kind in ("flat", "vlan"):
        if not physical_network:
            raise invalid(f"provider:physical_network is required for a {kind} network.")
        if kind == "vlan" or physical_network != PUBLIC_PHYSICAL_NETWORK:
            title = "VLAN" if kind == "vlan" else kind
            raise invalid(f"physical_network '{physical_network}' unknown for {title} provider network.")
    elif physical_network:
        raise invalid(f"provider:physical_network cannot be given for a {kind} network.")
    elif kind not in ("local", settings.tenant_network_type):
        raise invalid(f"Invalid input for operation: network_type value '{kind}' not supported.")
    if kind in ("flat", "local"):
        if segment is not None:
            raise invalid(f"provider:segmentation_id cannot be given for a {kind} network.")
        return kind, physical_network, 0 if kind == "flat" else None
    least, most = SEGMENTS[kind]
    if segment is not None and not least <= segment <= most:
        raise invalid(f"provider:segmentation_id must be between {least} and {most} for a {kind} network.")
    return kind, physical_network, segment


def _free_segments(conn: sa.Connection, row: NewNetwork) -> Iterator[int | None]:
    """Yield the segments on which a new network may be, the likely free ones first."""
    kind = row["network_type"]
    if kind not in SEGMENTS or row["segmentation_id"] is not None:
        yield row["segmentation_id"]
        return
    same = sa.and_(networks.c.network_type == kind, networks.c.physical_network == row["physical_network"])
    least, most = SEGMENTS[kind]
    highest = conn.execute(sa.select(sa.func.max(networks.c.segmentation_id)).where(same)).scalar()
    start = least if highest is None or highest >= most else highest + 1
    yield from range(start, min(start + 64, most + 1))
    taken = set(conn.execute(sa.select(networks.c.segmentation_id).where(same)).scalars())
    yield from (number for number in range(least, most + 1) if number not in taken)


def _no_segment(row: NewNetwork) -> Exception:
    """Return the error for a network whose segment, or every segment, is in use."""
    kind = row["network_type"]
    if kind in SEGMENTS and row["segmentation_id"] is None:
        return conflict("Unable to create the network. No segment is available.", "NoNetworkAvailable")
    type_ = "FlatNetworkInUse" if kind == "flat" else "TunnelIdInUse"
    return conflict(f"Unable to create the network. The {kind} segment is in use by another network.", type_)


def _mtu(given: dict[str, Any], kind: str, settings: NetworkServiceSettings) -> int:
    most = settings.mtu - OVERHEAD.get(kind, 0)
    mtu = given.get("mtu") or most
    if not 68 <= mtu <= most:
        raise invalid(
            f"Invalid input for mtu: {mtu} is not between 68 and {most}, the MTU of the physical network "
            "without the headers of tunnels."
        )
    return int(mtu)


def _only_default(conn: sa.Connection, id: str, external: bool) -> None:
    if not external:
        return
    found = conn.execute(
        sa.select(networks.c.id).where(networks.c.is_default, networks.c.external, networks.c.id != id)
    ).scalar()
    if found:
        raise conflict(f"A default external network already exists: {found}.", "DefaultExternalNetworkExists")


def _check_unshared(conn: sa.Connection, row: NetworkRow) -> None:
    if dependent_projects(conn, NETWORK, row.id, row.project_id, SHARED, ALL):
        raise conflict(
            f"Unable to reconfigure sharing settings for network {row.id}. Multiple tenants are using it.",
            "InvalidSharedSetting",
        )


def _check_not_external(conn: sa.Connection, row: NetworkRow) -> None:
    if conn.execute(sa.select(routers.c.id).where(routers.c.external_network_id == row.id).limit(1)).first():
        raise conflict(
            f"External network {row.id} cannot be updated to be made non-external, since it has existing gateway "
            f"ports.",
            "ExternalNetworkInUse",
        )
