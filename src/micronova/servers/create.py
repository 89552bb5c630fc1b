"""Creating servers: the checks that need other services or the database, and the transaction that accepts a request.

A request is accepted when its transaction is committed: instances, request specs, block devices, quota usage,
instance actions and operations together. Only then a message tells a conductor, and that message may be lost.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import sqlalchemy as sa

from micronova.clients.expiring_cache import ExpiringCache
from micronova.db import (
    group_members,
    instance_actions,
    instances,
    quotas,
    server_groups,
)
from micronova.db import operations as operation_rows
from micronova.db.secrets import Secrets
from micronova.notifications import resources
from micronova.objects.block_device import BlockDevice, root_volume, with_names
from micronova.objects.clock import micros
from micronova.objects.context import RequestContext
from micronova.objects.errors import Invalid, NotFound, QuotaExceeded
from micronova.objects.flavor import Flavor
from micronova.objects.ids import new_uuid
from micronova.objects.image import ImageMeta
from micronova.objects.network import NetworkPlan, PlannedPorts
from micronova.objects.operations import BuildPayload, OperationRow, instance_action
from micronova.objects.port_resources import PortResources
from micronova.objects.scheduling import GroupSpec, RequestSpec
from micronova.plugins.hooks import Hooks
from micronova.servers.create_rules import (
    Created,
    CreateRequest,
    allowed_count,
    check_boot_source,
    check_hardware,
    check_item_limits,
    chosen_disk_config,
    instance_row,
    make_password,
    merge_devices,
)
from micronova.servers.create_volumes import CREATION_TIME, NewServerVolumes, VolumePlan, has_volumes
from micronova.servers.dependencies import RequestDependencies
from micronova.servers.image_devices import devices_of
from micronova.servers.image_refs import named_image
from micronova.servers.lookups import (
    check_destination,
    check_hinted_servers,
    flavor_for,
    hinted_group,
    no_group,
    public_key,
    zone_to_keep,
)
from micronova.telemetry.logs import server_id

IMAGE_CACHED = 2.0  # seconds for which an image is not read again on behalf of the same token
MOST_IMAGES = 1000  # that are cached


@dataclass(frozen=True, kw_only=True)
class _Accepted:
    """A request that passed all checks, with all that its transaction records."""

    context: RequestContext
    request: CreateRequest
    spec: RequestSpec
    public_key: str | None
    devices: list[BlockDevice]
    volumes: VolumePlan
    ports: PlannedPorts
    security_groups: list[str]
    password: str
    reservation_id: str
    allowed_count: int  # the most servers to make: max_count of the request, or fewer if the port quota is smaller
    disk_config: str
    trusted_certs: list[str] | None


def _resources(plan: NetworkPlan, request: CreateRequest) -> tuple[PortResources, ...]:
    """Return what the ports of a request ask of resource providers; raise Invalid if it may not have such ports."""
    ports = () if isinstance(plan.ports, str) else plan.ports
    asking = tuple(port.resources for port in ports if port.resources is not None)
    if asking and not request.may_claim_for_ports:
        raise Invalid(
            "Creating servers with ports having resource requests, like a port with a QoS minimum bandwidth policy, "
            "is not supported until microversion 2.72."
        )
    return asking


class ServerCreator:
    """Accepts requests to create servers."""

    def __init__(self, dependencies: RequestDependencies, *, hooks: Hooks, default_schedule_zone: str | None) -> None:
        self._database = dependencies.database
        self._clock = dependencies.clock
        self._random = dependencies.random
        self._conductor = dependencies.conductor
        self._secrets = dependencies.secrets
        self._hooks = hooks
        self._notifier = dependencies.notifier
        self._quota_defaults = dependencies.quota_defaults
        self._image_client = dependencies.image_client
        self._images = ExpiringCache[tuple[str, str], ImageMeta](IMAGE_CACHED, MOST_IMAGES)  # by token and id
        self._network_client = dependencies.network_client
        self._volumes = NewServerVolumes(dependencies)
        self._unsupported = dependencies.unsupported
        self._signatures = dependencies.signatures
        self._boot_images = dependencies.boot_images
        self._timeout = dependencies.operation_timeout
        self._default_zone = dependencies.default_zone
        self._default_schedule_zone = default_schedule_zone

    async def create(self, context: RequestContext, request: CreateRequest) -> Created:
        """Accept a request to create servers; it is durable when this returns."""
        self._hooks.pre("create_instance", context, request)
        accepted = await self._check(context, request)
        uuids, operations = await self._commit(accepted)
        if len(uuids) == 1:
            server_id.set(uuids[0])
        if accepted.volumes.creates:
            operations = [*operations, *await self._volumes.create(context, uuids, operations)]
        if accepted.spec.server_group is not None and self._notifier.enabled:
            await self._announce_members(context, accepted.spec.server_group.id, uuids)
        await self._conductor.run_operations(context.for_bus(), tuple(operations))
        created = Created(uuids, accepted.reservation_id, accepted.password, accepted.disk_config)
        self._hooks.post("create_instance", created, context, request)
        return created

    async def _check(self, context: RequestContext, request: CreateRequest) -> _Accepted:
        """Check all that needs no transaction; raise an error of the API if a check fails."""
        self._unsupported.check_hints(request.hints)
        flavor, key, group, zone = await self._database.read(self._look_up, context, request)
        self._unsupported.check_flavor(flavor)
        image, plan = await asyncio.gather(self._image(context, request), self._plan_networks(context, request))
        trusted_certs = self._signatures.trusted(request.trusted_certs)
        image, volumes = await self._plan_disks(context, request, flavor, image, trusted_certs)
        spec = RequestSpec(
            project_id=context.project_id,
            user_id=context.user_id,
            flavor=msgspec.structs.replace(flavor, root_on_volume=root_volume(volumes.devices) is not None),
            image=image,
            availability_zone=zone,
            force_host=request.force_host,
            force_node=request.force_node,
            requested_host=request.requested_host,
            requested_node=request.requested_node,
            hints=request.hints,
            server_group=group,
            ports=_resources(plan, request),
        )
        return _Accepted(
            context=context,
            request=request,
            spec=spec,
            public_key=key,
            devices=with_names(volumes.devices),
            volumes=volumes,
            ports=plan.ports,
            security_groups=list(plan.security_groups),
            password=request.admin_password or make_password(self._random),
            reservation_id="r-" + "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=8)),
            allowed_count=allowed_count(request, plan),
            disk_config=chosen_disk_config(request, image),
            trusted_certs=trusted_certs,
        )

    async def _plan_disks(
        self,
        context: RequestContext,
        request: CreateRequest,
        flavor: Flavor,
        image: ImageMeta | None,
        trusted_certs: Sequence[str] | None,
    ) -> tuple[ImageMeta | None, VolumePlan]:
        """Return the image as a host gets it, and the volumes; check both against the flavor.

        Without an image, that of the root volume is returned, if it has one.
        """
        if image is None:
            check_boot_source(image, flavor, request, request.block_devices)
        of_image = await self._devices_of_image(context, request, image)
        devices = merge_devices(request.block_devices, flavor, image, of_image)
        from_volume = root_volume(devices) is not None
        if from_volume and trusted_certs:
            raise Invalid("Image certificate validation is not supported when booting from volume.")
        volumes = await self._volumes.plan(
            context, devices, count=request.max_count, may_be_shared=request.may_share_volumes
        )
        if from_volume:
            image = image or volumes.image
        check_boot_source(image, flavor, request, devices)
        if image is not None:
            # The devices of the image are in `devices` already.
            image = msgspec.structs.replace(image, block_device_mapping="")
            self._unsupported.check_properties(image, flavor)
        check_hardware(flavor, image)
        self._unsupported.check_devices(flavor, image)
        if image is not None and not from_volume:
            image = await self._boot_images.complete(
                image, trusted_certs, ram=flavor.ram, user_token=context.token, image_token=context.token
            )
        return image, volumes

    async def _commit(self, accepted: _Accepted) -> tuple[list[str], list[str]]:
        """Reserve the volumes and record the request; return the ids of the instances and of their operations."""
        context, volumes = accepted.context, accepted.volumes
        # Servers have their ids before volumes are reserved for them.
        ids = [new_uuid(self._random) for _ in range(accepted.allowed_count if has_volumes(volumes.devices) else 0)]
        await self._volumes.reserve(context, volumes, ids)
        try:
            uuids, operations = await self._database.write(self._record, accepted, ids)
        except BaseException:
            if ids:  # the commit may have succeeded and its answer be lost: recorded servers keep their reservations
                kept = [*await self._database.read(instances.get_many, ids)]
                await self._volumes.release(context, volumes, kept)
            raise
        await self._volumes.release(context, volumes, uuids)  # of servers that the quota does not allow
        return uuids, operations

    async def _announce_members(self, context: RequestContext, group: str, uuids: Sequence[str]) -> None:
        try:
            row, members = await self._database.read(server_groups.get_with_members, group)
        except NotFound:  # it was deleted meanwhile
            return
        joined = partial(resources.server_group, "add_member", row, members, uuids)
        self._notifier.announce(context.for_bus(), joined)

    def _look_up(
        self, conn: sa.Connection, context: RequestContext, request: CreateRequest
    ) -> tuple[Flavor, str | None, GroupSpec | None, str | None]:
        """Return the flavor, the public key, the server group and the zone of the request; check hosts and zone."""
        flavor = flavor_for(conn, context, request.flavor_id)
        key = None if request.key_name is None else public_key(conn, context, request.key_name)
        check_destination(conn, request, self._default_zone)
        check_hinted_servers(conn, context.project_id, request.hints)
        group = hinted_group(conn, context.project_id, request.hints)
        return flavor, key, group, zone_to_keep(conn, request, self._default_schedule_zone)

    async def _image(self, context: RequestContext, request: CreateRequest) -> ImageMeta | None:
        return None if request.image_id is None else await self._cached_image(context, request.image_id)

    async def _cached_image(self, context: RequestContext, id: str) -> ImageMeta:
        return await self._images.get((context.token, id), partial(named_image, self._image_client, context, id))

    async def _devices_of_image(
        self, context: RequestContext, request: CreateRequest, image: ImageMeta | None
    ) -> list[BlockDevice]:
        """Return the block devices of the server's image, or of the one that its root volume is to be made of."""
        if image is None:
            root = next(device for device in request.block_devices if device.boot_index == 0)
            if root.image_id is None:
                return []
            image = await self._cached_image(context, root.image_id)
        return devices_of(image)

    async def _plan_networks(self, context: RequestContext, request: CreateRequest) -> NetworkPlan:
        if self._network_client is None:
            return NetworkPlan(ports="none")
        return await self._network_client.planner.plan(
            request.networks,
            request.security_groups,
            token=context.token,
            project_id=context.project_id,
            count=request.max_count,
            may_attach_external=request.may_attach_external,
        )

    def _record(self, conn: sa.Connection, accepted: _Accepted, ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Record a request in one transaction; return the ids of the instances and of their operations.

        `ids` are those of instances that volumes are reserved for; without volumes it is empty.
        """
        context, request, spec = accepted.context, accepted.request, accepted.spec
        now = micros(self._clock.now())
        flavor = spec.flavor
        limits = quotas.limits_for(conn, context.project_id, self._quota_defaults, context.user_id)
        check_item_limits(request.metadata, request.injected_files, limits)
        members = 0
        if spec.server_group is not None:  # every transaction locks groups before quotas
            if not group_members.lock(conn, [spec.server_group.id]):
                raise no_group(spec.server_group.id)
            members = instances.count_in_group(conn, spec.server_group.id)
        count = quotas.charge_up_to(
            conn,
            context.project_id,
            quotas.of_server(flavor.vcpus, flavor.ram),
            request.min_count,
            accepted.allowed_count,
            limits,
            context.user_id,
        )
        if spec.server_group is not None and quotas.exceeds(limits, "server_group_members", members + count):
            raise QuotaExceeded("Quota exceeded, too many servers in group")
        uuids = list(ids[:count]) or [new_uuid(self._random) for _ in range(count)]
        self._volumes.record(conn, accepted.volumes, uuids)
        ports = msgspec.to_builtins(accepted.ports)
        instances.insert(
            conn,
            [
                instance_row(
                    context,
                    request,
                    spec,
                    public_key=accepted.public_key,
                    security_groups=accepted.security_groups,
                    reservation_id=accepted.reservation_id,
                    disk_config=accepted.disk_config,
                    trusted_certs=accepted.trusted_certs,
                    id=id,
                    index=index,
                    count=count,
                    now=now,
                )
                for index, id in enumerate(uuids)
            ],
            [{"instance_uuid": id, "spec": msgspec.msgpack.encode(spec), "networks": ports} for id in uuids],
            [self._device_row(id, device, accepted.volumes) for id in uuids for device in accepted.devices],
        )
        action = instance_action("build")
        instance_actions.start(conn, uuids, context.request_id, action, context.user_id, context.project_id, now)
        operations = [self._operation(accepted, id, now) for id in uuids]
        operation_rows.insert(conn, operations)
        return uuids, [row["id"] for row in operations]

    def _device_row(self, instance_uuid: str, device: BlockDevice, volumes: VolumePlan) -> instances.DeviceRow:
        id = new_uuid(self._random)
        attachment = volumes.reserved.get((instance_uuid, device.volume_id or ""))
        own = msgspec.structs.replace(device, uuid=id, attachment_id=attachment)
        return instances.device_row(instance_uuid, own)

    def _operation(self, accepted: _Accepted, instance_uuid: str, now: int) -> OperationRow:
        id = new_uuid(self._random)
        secrets = Secrets(
            admin_password=accepted.password,
            injected_files=tuple(accepted.request.injected_files),
            user_token=accepted.context.token if accepted.volumes.creates else None,
        )
        return operation_rows.new_row(
            id=id,
            kind="build",
            instance_uuid=instance_uuid,
            batch_id=accepted.reservation_id,
            step="schedule",
            epoch=1,
            now=now,
            deadline=now + micros(self._timeout),
            deferred_until=now + micros(CREATION_TIME) if accepted.volumes.creates else 0,
            context=accepted.context.for_bus(),
            payload=BuildPayload(volumes=has_volumes(accepted.devices)),
            secrets=self._secrets.seal(secrets, id),
        )
