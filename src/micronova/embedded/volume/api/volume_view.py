"""Volumes as the API shows them, at each microversion."""

from typing import Any

from micronova.embedded.volume.api.listing import Links
from micronova.embedded.volume.core import is_admin_or_service
from micronova.embedded.volume.model import ATTACHED, Attachment, Volume
from micronova.http.paging import iso_micros
from micronova.http.request import Request


class VolumeView:
    """Shows volumes to the caller of one request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._links = Links(request)
        self._admin = request.context.is_admin

    def brief(self, volume: Volume) -> dict[str, Any]:
        """Return what a list without details has."""
        return {"id": volume.id, "name": volume.name, "links": self._links.of("volumes", volume.id)}

    def full(self, volume: Volume) -> dict[str, Any]:
        """Return all fields, as Cinder does if a volume is shown or listed."""
        shown, request = self.plain(volume), self._request
        if request.allows(volume.target, "volume_extension:volume_tenant_attribute"):
            shown["os-vol-tenant-attr:tenant_id"] = volume.project_id
        if request.allows(volume.target, "volume_extension:volume_host_attribute"):
            shown["os-vol-host-attr:host"] = f"{volume.host}#{volume.host.rpartition('@')[2]}"
        if request.allows(volume.target, "volume_extension:volume_mig_status_attribute"):
            shown["os-vol-mig-status-attr:migstat"] = None
            shown["os-vol-mig-status-attr:name_id"] = None
        if volume.image_metadata and request.allows(volume.target, "volume_extension:volume_image_metadata:show"):
            shown["volume_image_metadata"] = volume.image_metadata
        return shown

    def plain(self, volume: Volume) -> dict[str, Any]:
        """Return the fields that the answers to a create and a change have."""
        minor = self._request.minor
        shown: dict[str, Any] = {
            "id": volume.id,
            "status": volume.status,
            "size": volume.size,
            "availability_zone": volume.availability_zone,
            "created_at": iso_micros(volume.created_at),
            "updated_at": iso_micros(volume.updated_at),
            "name": volume.name,
            "description": volume.description,
            "volume_type": volume.type_name,
            "snapshot_id": volume.snapshot_id,
            "source_volid": volume.source_volid,
            "metadata": {**volume.metadata, **_readonly(volume)},
            "links": self._links.of("volumes", volume.id),
            "user_id": volume.user_id,
            "bootable": str(volume.bootable).lower(),
            "encrypted": volume.encryption_key_id is not None,
            "replication_status": None,
            "consistencygroup_id": None,
            "multiattach": volume.multiattach,
            "attachments": [self._attachment(each) for each in volume.attachments if each.attach_status == ATTACHED],
        }
        if self._admin:
            shown["migration_status"] = None
        if minor >= 13:
            shown["group_id"] = None
        if minor >= 21 and self._admin:
            shown["provider_id"] = None
        if minor >= 48:
            shown["shared_targets"] = False
            shown["service_uuid"] = None
        if minor >= 61 and self._admin:
            shown["cluster_name"] = None
        if minor >= 63:
            shown["volume_type_id"] = volume.volume_type_id
        if minor >= 64 and volume.encryption_key_id is not None:
            shown["encryption_key_id"] = volume.encryption_key_id
        if minor >= 65:
            shown["consumes_quota"] = True
        return shown

    def _attachment(self, attachment: Attachment) -> dict[str, Any]:
        return {
            "id": attachment.volume_id,
            "attachment_id": attachment.id,
            "volume_id": attachment.volume_id,
            "server_id": attachment.instance_uuid,
            "host_name": attachment.attached_host if is_admin_or_service(self._request) else None,
            "device": attachment.mountpoint,
            "attached_at": iso_micros(attachment.attached_at),
        }


def _readonly(volume: Volume) -> dict[str, str]:
    return {} if volume.readonly is None else {"readonly": str(volume.readonly)}
