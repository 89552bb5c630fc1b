"""Converts a row of `instances` to the data that hosts and guests get."""

import msgspec

from micronova.objects.block_device import ROOT_DEVICE
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.instance import InstanceRow
from micronova.objects.network import VIF
from micronova.objects.orders import InstanceSpec


def instance_spec(row: InstanceRow) -> InstanceSpec:
    """Return the instance as its host sees it."""
    return InstanceSpec(
        uuid=row["uuid"],
        project_id=row["project_id"],
        user_id=row["user_id"],
        name=row["display_name"],
        hostname=row["hostname"],
        flavor=msgspec.convert(row["flavor"], Flavor),
        node=row["node"],
        availability_zone=row["availability_zone"],
        image=msgspec.convert(row["image"], ImageMeta) if row["image"] else None,
        metadata=row["metadata"],
        tags=tuple(row["tags"]),
        key_name=row["key_name"],
        key_data=row["key_data"],
        user_data=row["user_data"],
        config_drive=bool(row["config_drive"]),
        reservation_id=row["reservation_id"],
        launch_index=row["launch_index"],
        root_device_name=row["root_device_name"] or ROOT_DEVICE,
        security_groups=tuple(row["security_groups"]),
    )


def vifs(row: InstanceRow) -> tuple[VIF, ...]:
    """Return the instance's interfaces as they were last seen."""
    return msgspec.convert(row["network_info"], tuple[VIF, ...])
