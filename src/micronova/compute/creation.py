"""Accepting servers to be built: checks that need more than the request, and the one transaction that accepts it.

A request is accepted when its transaction is committed: instances, specs, block devices, quota, the action record
and the operation together. Only then is a conductor told, and that message may get lost.
"""

import asyncio
import logging
import random
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import sqlalchemy as sa

from micronova.compute.acceptance import rpc_context
from micronova.compute.hooks import Hooks
from micronova.compute.interfaces import Networks
from micronova.compute.new_servers import (
    Created,
    CreateRequest,
    check_counts,
    check_image,
    check_item_limits,
    instance_row,
    make_password,
    merge_devices,
    network_plan,
)
from micronova.conductor.build_payload import BuildPayload
from micronova.conductor.operations import new_row
from micronova.conductor.rpcapi import ConductorAPI
from micronova.conductor.secrets import SecretBox, Secrets
from micronova.db import actions, aggregates, flavors, instances, keypairs, nodes, quotas, server_groups, services
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.http.context import RequestContext
from micronova.objects.block_device import BlockDevice
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Invalid, NotFound, QuotaExceeded
from micronova.objects.flavor import Flavor
from micronova.objects.ids import new_uuid
from micronova.objects.image import ImageMeta
from micronova.objects.scheduling import GroupSpec, RequestSpec
from micronova.rpc.contract import Context
from micronova.rpc.errors import BusUnavailable

log = logging.getLogger(__name__)

IMAGE_REMEMBERED = 2.0  # seconds for which a user's view of an image is taken as it was


class Images(Protocol):
    """What creating a server needs of the image service."""

    async def get(self, image_id: str, token: str) -> ImageMeta:
        """Return an image that the user may boot from; NotFound otherwise."""


class Creation:
    """Accepts servers."""

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        random: random.Random,
        conductor: ConductorAPI,
        secrets: SecretBox,
        hooks: Hooks,
        quota_defaults: Mapping[str, int],
        images: Images | None,
        networks: Networks | None,
        build_timeout: float,
        service_down_time: float,
        default_zone: str,
        default_schedule_zone: str | None,
    ) -> None:
        self._database = database
        self._clock = clock
        self._random = random
        self._conductor = conductor
        self._secrets = secrets
        self._hooks = hooks
        self._quota_defaults = quota_defaults
        self._images = images
        self._images_seen: dict[tuple[str, str], tuple[float, ImageMeta]] = {}
        self._networks = networks
        self._build_timeout = build_timeout
        self._service_down_time = service_down_time
        self._default_zone = default_zone
        self._default_schedule_zone = default_schedule_zone

    async def create(self, context: RequestContext, request: CreateRequest) -> Created:
        """Accept servers to be built; durable when this returns."""
        self._hooks.pre("create_instance", context, request)
        flavor, key, group = await self._database.read(self._look_up, context, request)
        image, plan = await asyncio.gather(self._image(context, request), self._validate_networks(context, request))
        check_image(image, flavor, request)
        devices = merge_devices(request, flavor, image)
        networks, groups = network_plan(request, plan)
        check_counts(request, networks, plan)
        spec = RequestSpec(
            project_id=context.project_id,
            user_id=context.user_id,
            flavor=flavor,
            image=image,
            availability_zone=request.availability_zone or self._default_schedule_zone,
            force_host=request.force_host,
            force_node=request.force_node,
            requested_host=request.requested_host,
            requested_node=request.requested_node,
            hints=request.hints,
            group=group,
        )
        rpc = rpc_context(context)
        password = request.admin_password or make_password(self._random)
        reservation = "r-" + "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=8))
        uuids, operations = await self._database.write(
            self._commit, context, request, spec, key, devices, networks, groups, password, reservation, rpc
        )
        try:
            await self._conductor.build_instances(rpc, tuple(operations))
        except BusUnavailable as error:
            log.warning("the bus did not take a hint (%s); the next sweep starts the build", error)
        created = Created(uuids, reservation, password, groups, request.disk_config)
        self._hooks.post("create_instance", created, context, request)
        return created

    def _look_up(
        self, conn: sa.Connection, context: RequestContext, request: CreateRequest
    ) -> tuple[Flavor, Any, GroupSpec | None]:
        """Find what the request names in our own database, all in one read."""
        try:
            flavor = flavors.get(conn, request.flavor_id, None if "admin" in context.roles else context.project_id)
        except NotFound:
            raise Invalid(f"Flavor {request.flavor_id} could not be found.") from None
        if flavor.disabled:
            raise Invalid(f"Flavor {request.flavor_id} is disabled: choose another one.")
        key = None
        if request.key_name is not None:
            try:
                key = keypairs.get(conn, context.user_id, request.key_name)
            except NotFound:
                raise Invalid(
                    f"Invalid key_name provided: there is no key pair {request.key_name!r} of yours."
                ) from None
        self._check_places(conn, request)
        return flavor, key, self._group(conn, context, request)

    def _check_places(self, conn: sa.Connection, request: CreateRequest) -> None:
        hosts = {request.force_host, request.requested_host} - {None}
        for host in hosts:
            if not services.list_(conn, binary="nova-compute", host=host):
                raise Invalid(f"Compute host {host} could not be found.")
        for node in {request.force_node, request.requested_node} - {None}:
            found = [row.host for row in nodes.list_(conn, pattern=node) if row.hypervisor_hostname == node]
            if not found or not hosts <= set(found):
                raise Invalid(f"Compute host {node} could not be found.")
        wanted = request.availability_zone
        if wanted is None or request.force_host is not None or request.force_node is not None:
            return
        zones = aggregates.zones(conn)  # host -> zone
        now = self._clock.now()
        for service in services.list_(conn, binary="nova-compute"):
            usable = not service.disabled and now - service.last_seen_at / 1e6 < self._service_down_time
            if usable and zones.get(service.host, self._default_zone) == wanted:
                return
        raise Invalid(f"The requested availability zone {wanted!r} is not available.")

    def _group(self, conn: sa.Connection, context: RequestContext, request: CreateRequest) -> GroupSpec | None:
        named = request.hints.get("group")
        if not named:
            return None
        try:
            group = server_groups.get(conn, named[0])
        except NotFound:
            group = None
        if group is None or group.project_id != context.project_id:
            raise Invalid(f"Instance group {named[0]} could not be found.")
        return GroupSpec(
            id=group.uuid,
            policy=group.policy,
            max_server_per_host=int((group.rules or {}).get("max_server_per_host", 1)),
        )

    async def _image(self, context: RequestContext, request: CreateRequest) -> ImageMeta | None:
        if request.image_id is None:
            return None
        if self._images is None:
            return ImageMeta(id=request.image_id)
        key, now = (context.token, request.image_id), self._clock.monotonic()
        seen = self._images_seen.get(key)
        if seen is not None and now - seen[0] < IMAGE_REMEMBERED:
            return seen[1]
        try:
            image = await self._images.get(request.image_id, context.token)
        except NotFound:
            raise Invalid(f"Invalid imageRef provided: image {request.image_id} could not be found.") from None
        if len(self._images_seen) >= 1000:
            self._images_seen.clear()
        self._images_seen[key] = (now, image)
        return image

    async def _validate_networks(self, context: RequestContext, request: CreateRequest) -> Any:
        if self._networks is None or request.networks == "none":
            return None
        return await self._networks.validate(
            request.networks,
            request.security_groups,
            token=context.token,
            project_id=context.project_id,
            count=request.max_count,
        )

    def _commit(
        self,
        conn: sa.Connection,
        context: RequestContext,
        request: CreateRequest,
        spec: RequestSpec,
        key: Any,
        devices: list[BlockDevice],
        networks: Any,
        groups: list[str],
        password: str,
        reservation: str,
        rpc: Context,
    ) -> tuple[list[str], list[str]]:
        """The transaction that accepts a request."""
        now = micros(self._clock.now())
        flavor = spec.flavor
        limits = quotas.limits_for(conn, context.project_id, self._quota_defaults, context.user_id)
        check_item_limits(request, limits)
        # A group is locked before the quota, as by all who lock both; its number of members is true until we commit.
        members = instances.count_in_group(conn, spec.group.id) if spec.group is not None else 0
        count = quotas.charge_up_to(
            conn,
            context.project_id,
            {"instances": 1, "cores": flavor.vcpus, "ram": flavor.ram},
            request.min_count,
            request.max_count,
            limits,
            context.user_id,
        )
        if spec.group is not None and 0 <= limits.get("server_group_members", -1) < members + count:
            raise QuotaExceeded("Quota exceeded, too many servers in group")
        uuids = [new_uuid(self._random) for _ in range(count)]
        instances.insert(
            conn,
            [
                instance_row(context, request, spec, key, groups, reservation, uuids[i], i, count, now)
                for i in range(count)
            ],
            [{"instance_uuid": each, "spec": msgspec.msgpack.encode(spec), "networks": networks} for each in uuids],
            [self._device_row(each, device) for each in uuids for device in devices],
        )
        actions.start(conn, uuids, context.request_id, "create", context.user_id, context.project_id, now)
        secrets = Secrets(admin_password=password, injected_files=tuple(request.files))
        operations = [self._operation(each, reservation, now, rpc, secrets) for each in uuids]
        operation_rows.insert(conn, operations)
        return uuids, [row["id"] for row in operations]

    def _device_row(self, instance_uuid: str, device: BlockDevice) -> dict[str, Any]:
        id = new_uuid(self._random)
        own = msgspec.structs.replace(device, uuid=id)
        return {"uuid": id, "instance_uuid": instance_uuid, "device": msgspec.to_builtins(own)}

    def _operation(
        self, instance_uuid: str, reservation: str, now: int, rpc: Context, secrets: Secrets
    ) -> dict[str, Any]:
        id = new_uuid(self._random)
        return new_row(
            id=id,
            kind="build",
            version=1,
            instance_uuid=instance_uuid,
            group_id=reservation,
            step="schedule",
            epoch=1,
            now=now,
            deadline=now + micros(self._build_timeout),
            context=rpc,
            payload=BuildPayload(),
            secrets=self._secrets.seal(secrets, id),
        )
