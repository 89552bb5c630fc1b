"""Extensions: what clients read to find out what a cloud can do.

OpenStack adds no more to its list. The extensions that other packages add to this API follow it.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from micronova.api.extension import Extension
from micronova.api.inputs import STRICT, NoQuery
from micronova.api.installed_extensions import Extensions
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import NotFound
from micronova.policies.compute import RULES

_ALIASES = {
    "NMN": "Multinic",
    "OS-DCF": "DiskConfig",
    "OS-EXT-AZ": "ExtendedAvailabilityZone",
    "OS-EXT-IMG-SIZE": "ImageSize",
    "OS-EXT-IPS": "ExtendedIps",
    "OS-EXT-IPS-MAC": "ExtendedIpsMac",
    "OS-EXT-SRV-ATTR": "ExtendedServerAttributes",
    "OS-EXT-STS": "ExtendedStatus",
    "OS-FLV-DISABLED": "FlavorDisabled",
    "OS-FLV-EXT-DATA": "FlavorExtraData",
    "OS-SCH-HNT": "SchedulerHints",
    "OS-SRV-USG": "ServerUsage",
    "os-access-ips": "AccessIPs",
    "os-admin-actions": "AdminActions",
    "os-admin-password": "AdminPassword",
    "os-agents": "Agents",
    "os-aggregates": "Aggregates",
    "os-assisted-volume-snapshots": "AssistedVolumeSnapshots",
    "os-attach-interfaces": "AttachInterfaces",
    "os-availability-zone": "AvailabilityZone",
    "os-baremetal-ext-status": "BareMetalExtStatus",
    "os-baremetal-nodes": "BareMetalNodes",
    "os-block-device-mapping": "BlockDeviceMapping",
    "os-block-device-mapping-v2-boot": "BlockDeviceMappingV2Boot",
    "os-cell-capacities": "CellCapacities",
    "os-cells": "Cells",
    "os-certificates": "Certificates",
    "os-cloudpipe": "Cloudpipe",
    "os-cloudpipe-update": "CloudpipeUpdate",
    "os-config-drive": "ConfigDrive",
    "os-console-auth-tokens": "ConsoleAuthTokens",
    "os-console-output": "ConsoleOutput",
    "os-consoles": "Consoles",
    "os-create-backup": "CreateBackup",
    "os-create-server-ext": "Createserverext",
    "os-deferred-delete": "DeferredDelete",
    "os-evacuate": "Evacuate",
    "os-extended-evacuate-find-host": "ExtendedEvacuateFindHost",
    "os-extended-floating-ips": "ExtendedFloatingIps",
    "os-extended-hypervisors": "ExtendedHypervisors",
    "os-extended-networks": "ExtendedNetworks",
    "os-extended-quotas": "ExtendedQuotas",
    "os-extended-rescue-with-image": "ExtendedRescueWithImage",
    "os-extended-services": "ExtendedServices",
    "os-extended-services-delete": "ExtendedServicesDelete",
    "os-extended-status": "ExtendedStatus",
    "os-extended-volumes": "ExtendedVolumes",
    "os-fixed-ips": "FixedIPs",
    "os-flavor-access": "FlavorAccess",
    "os-flavor-extra-specs": "FlavorExtraSpecs",
    "os-flavor-manage": "FlavorManage",
    "os-flavor-rxtx": "FlavorRxtx",
    "os-flavor-swap": "FlavorSwap",
    "os-floating-ip-dns": "FloatingIpDns",
    "os-floating-ip-pools": "FloatingIpPools",
    "os-floating-ips": "FloatingIps",
    "os-floating-ips-bulk": "FloatingIpsBulk",
    "os-fping": "Fping",
    "os-hide-server-addresses": "HideServerAddresses",
    "os-hosts": "Hosts",
    "os-hypervisor-status": "HypervisorStatus",
    "os-hypervisors": "Hypervisors",
    "os-instance-actions": "InstanceActions",
    "os-instance_usage_audit_log": "OSInstanceUsageAuditLog",
    "os-keypairs": "Keypairs",
    "os-lock-server": "LockServer",
    "os-migrate-server": "MigrateServer",
    "os-migrations": "Migrations",
    "os-multiple-create": "MultipleCreate",
    "os-networks": "Networks",
    "os-networks-associate": "NetworkAssociationSupport",
    "os-pause-server": "PauseServer",
    "os-personality": "Personality",
    "os-preserve-ephemeral-rebuild": "PreserveEphemeralOnRebuild",
    "os-quota-class-sets": "QuotaClasses",
    "os-quota-sets": "Quotas",
    "os-rescue": "Rescue",
    "os-security-group-default-rules": "SecurityGroupDefaultRules",
    "os-security-groups": "SecurityGroups",
    "os-server-diagnostics": "ServerDiagnostics",
    "os-server-external-events": "ServerExternalEvents",
    "os-server-group-quotas": "ServerGroupQuotas",
    "os-server-groups": "ServerGroups",
    "os-server-list-multi-status": "ServerListMultiStatus",
    "os-server-password": "ServerPassword",
    "os-server-sort-keys": "ServerSortKeys",
    "os-server-start-stop": "ServerStartStop",
    "os-services": "Services",
    "os-shelve": "Shelve",
    "os-simple-tenant-usage": "SimpleTenantUsage",
    "os-suspend-server": "SuspendServer",
    "os-tenant-networks": "OSTenantNetworks",
    "os-used-limits": "UsedLimits",
    "os-used-limits-for-admin": "UsedLimitsForAdmin",
    "os-user-data": "UserData",
    "os-user-quotas": "UserQuotas",
    "os-virtual-interfaces": "VirtualInterfaces",
    "os-volume-attachment-update": "VolumeAttachmentUpdate",
    "os-volumes": "Volumes",
}


def _shown(alias: str, name: str) -> dict[str, Any]:
    return {
        "alias": alias,
        "name": name,
        "description": " ".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)) + ".",
        "links": [],
        "namespace": "http://docs.openstack.org/compute/ext/fake_xml",
        "updated": "2014-12-03T00:00:00Z",
    }


_SHAPE = {"alias": str, "name": str, "description": str, "links": [str], "namespace": str, "updated": str}
EXTENSIONS = {alias: _shown(alias, name) for alias, name in _ALIASES.items()}


def load_extensions() -> Extensions:
    """Load the extensions of the compute API that other packages bring."""
    return Extensions(RULES, EXTENSIONS)


def routes(installed: Callable[[], Iterable[Extension]]) -> list[Route]:
    """Declare the routes of extensions; `installed` returns those of other packages."""

    def known() -> dict[str, dict[str, Any]]:
        return EXTENSIONS | {each.alias: _installed(each) for each in installed()}

    async def index(request: Request) -> dict[str, Any]:
        """List extensions."""
        return {"extensions": list(known().values())}

    async def show(request: Request, id: str) -> dict[str, Any]:
        """Show an extension."""
        found = known().get(id)
        if found is None:
            raise NotFound(f"Extension {id} could not be found.")
        return {"extension": found}

    read = partial(Route, method="GET", policy="os_compute_api:extensions", query=NoQuery, strict_query=STRICT)
    return [
        read(path="/extensions", handler=index, answer={"extensions": [_SHAPE]}),
        read(path="/extensions/{id}", handler=show, answer={"extension": _SHAPE}),
    ]


def _installed(extension: Extension) -> dict[str, Any]:
    described = {"name": extension.name, "description": extension.description, "updated": extension.updated}
    return {**_shown(extension.alias, extension.name), **described}
