"""Notifications about everything that is not a server: aggregates, flavors, key pairs, server groups, services, errors.

Each function returns an `Announcement`, which has both formats. Names, versions and fields are Nova's. Nova has no
unversioned notifications about flavors and services.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from micronova.notifications import unversioned, versioned
from micronova.notifications.times import instant, spaced, with_fraction
from micronova.objects.context import Context
from micronova.objects.errors import OperationFailed
from micronova.objects.instance import Fault, InstanceRow
from micronova.objects.service_names import COMPUTE, CONDUCTOR

if TYPE_CHECKING:
    from micronova.db.aggregates import AggregateRow
    from micronova.db.flavors import FlavorRow
    from micronova.db.keypairs import KeyPairRow
    from micronova.db.server_groups import ServerGroupRow
    from micronova.db.services import ServiceRow
    from micronova.db.volume_usages import VolumeUsage
    from micronova.objects.orders import HostMetrics
    from micronova.objects.scheduling import RequestSpec

API = "nova-api"  # as versioned notifications name the API that sends them


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """One event in both formats."""

    event: str  # of the versioned notification
    payload: dict[str, Any]
    source: str = API
    host: str | None = None  # that it is sent in the name of; None: this process's own
    failed: bool = False
    # The unversioned notification; none is sent if the event has no name.
    old_event: str = ""
    old_payload: dict[str, Any] = field(default_factory=dict)
    old_publisher: str = "api"  # without a dot, the host follows


# --- aggregates ----------------------------------------------------------------------------------------------------

_OLD_ACTIONS = {
    "add_host": "addhost",
    "remove_host": "removehost",
    "update_prop": "updateprop",
    "update_metadata": "updatemetadata",
}


def aggregate(
    action: str,
    phase: str,
    *,
    uuid: str,
    name: str,
    number: int | None = None,  # none before it is created
    hosts: Sequence[str] = (),
    metadata: Mapping[str, str] | None = None,
    **more: Any,
) -> Announcement:
    """Return the notification about an action on an aggregate.

    `more` has further fields of the unversioned one; its field `name` is called `name_` here.
    """
    data = {"id": number, "uuid": uuid, "name": name, "hosts": list(hosts), "metadata": dict(metadata or {})}
    old: dict[str, Any] = {key.removesuffix("_"): value for key, value in more.items()}
    if action == "create":
        old["name"] = name
    if number is not None:
        old["aggregate_id"] = number
    return Announcement(
        event=f"aggregate.{action}.{phase}",
        payload=versioned.as_object("AggregatePayload", "1.1", data),
        old_event=f"aggregate.{_OLD_ACTIONS.get(action, action)}.{phase}" if action != "cache_images" else "",
        old_payload=old,
        old_publisher=f"aggregate.{number or name}",
    )


def aggregate_of(action: str, phase: str, row: "AggregateRow", hosts: Sequence[str], **more: Any) -> Announcement:
    """Return the notification about an action on an aggregate that exists."""
    facts: dict[str, Any] = {"uuid": row.uuid, "name": row.name, "number": row.id, "metadata": row.metadata}
    return aggregate(action, phase, hosts=hosts, **facts, **more)


def aggregate_cache(
    row: "AggregateRow", host: str, *, cached: Sequence[str], failed: Sequence[str], index: int, total: int
) -> Announcement:
    """Return the notification that a host of an aggregate has images in its cache, or not: the `index`th of `total`."""
    data = {
        "id": row.id,
        "uuid": row.uuid,
        "name": row.name,
        "host": host,
        "images_cached": list(cached),
        "images_failed": list(failed),
        "index": index,
        "total": total,
    }
    return Announcement(
        event="aggregate.cache_images.progress",
        payload=versioned.as_object("AggregateCachePayload", "1.0", data),
        source=CONDUCTOR,
    )


# --- flavors -------------------------------------------------------------------------------------------------------


def flavor(action: str, row: "FlavorRow", projects: Sequence[str] | None) -> Announcement:
    """Return the notification about a change of a flavor; `projects` may use it, None if it is deleted."""
    data = {
        "flavorid": row.flavorid,
        "name": row.name,
        "memory_mb": row.memory_mb,
        "vcpus": row.vcpus,
        "root_gb": row.root_gb,
        "ephemeral_gb": row.ephemeral_gb,
        "swap": row.swap,
        "rxtx_factor": row.rxtx_factor,
        "vcpu_weight": 0,
        "disabled": row.disabled,
        "is_public": row.is_public,
        "extra_specs": row.extra_specs,
        "projects": None if projects is None else list(projects),
        "description": row.description,
    }
    return Announcement(event=f"flavor.{action}", payload=versioned.as_object("FlavorPayload", "1.4", data))


# --- key pairs -----------------------------------------------------------------------------------------------------


def keypair(
    action: str,
    phase: str,
    context: Context,
    *,
    user_id: str,
    name: str,
    kind: str,
    fingerprint: str | None = None,
    public_key: str | None = None,
) -> Announcement:
    """Return the notification about an action on a key pair; before it is created, it has no key."""
    data = {"user_id": user_id, "name": name, "fingerprint": fingerprint, "public_key": public_key, "type": kind}
    return Announcement(
        event=f"keypair.{action}.{phase}",
        payload=versioned.as_object("KeypairPayload", "1.0", data),
        old_event=f"keypair.{action}.{phase}",
        old_payload={"tenant_id": context.project_id, "user_id": context.user_id, "key_name": name},
    )


def keypair_of(action: str, phase: str, context: Context, row: "KeyPairRow") -> Announcement:
    """Return the notification about an action on a key pair that exists."""
    return keypair(
        action,
        phase,
        context,
        user_id=row.user_id,
        name=row.name,
        kind=row.type,
        fingerprint=row.fingerprint,
        public_key=row.public_key,
    )


# --- server groups -------------------------------------------------------------------------------------------------


def server_group(action: str, row: "ServerGroupRow", members: Sequence[str], added: Sequence[str] = ()) -> Announcement:
    """Return the notification about a change of a server group; `added` are the servers that have just joined it."""
    data = {
        "uuid": row.uuid,
        "name": row.name,
        "user_id": row.user_id,
        "project_id": row.project_id,
        "policies": [row.policy],
        "policy": row.policy,
        "rules": {name: str(value) for name, value in (row.rules or {}).items()},
        "members": list(members),
        "hosts": None,  # as in Nova, which does not read them for this
    }
    old: dict[str, Any] = {"server_group_id": row.uuid}
    if action == "create":
        old |= {name: data[name] for name in ("name", "user_id", "project_id", "policy", "rules", "uuid")}
    elif added:
        old["instance_uuids"] = list(added)
    return Announcement(
        event=f"server_group.{action}",
        payload=versioned.as_object("ServerGroupPayload", "1.1", data),
        old_event=f"servergroup.{action.replace('_', '')}",
        old_payload=old,
        old_publisher="servergroup",
    )


# --- services ------------------------------------------------------------------------------------------------------


def service(action: str, row: "ServiceRow", zone: str | None = None) -> Announcement:
    """Return the notification about a service that registered, was enabled, disabled, forced down, or deleted."""
    data = {
        "host": row.host,
        "binary": row.binary,
        "topic": row.binary.removeprefix("nova-"),
        "report_count": 0,  # heartbeats are not counted here: the newest one's time is kept
        "disabled": row.disabled,
        "disabled_reason": row.disabled_reason,
        "availability_zone": zone,
        "last_seen_up": instant(row.last_seen_at),
        "forced_down": row.forced_down,
        "version": row.version,
        "uuid": row.uuid,
    }
    return Announcement(
        event=f"service.{action}",
        payload=versioned.as_object("ServiceStatusPayload", "1.1", data),
        source=row.binary,
        host=row.host,
    )


# --- metrics -------------------------------------------------------------------------------------------------------

_SHARES = frozenset({"cpu.user.percent", "cpu.kernel.percent", "cpu.idle.percent", "cpu.iowait.percent", "cpu.percent"})
_METRICS = _SHARES | {"cpu.frequency", "cpu.user.time", "cpu.kernel.time", "cpu.idle.time", "cpu.iowait.time"}


def metrics(host: str, measured: "HostMetrics") -> Announcement:
    """Return the notification about what a host has measured. Of percentages the unversioned one has fractions of 1."""
    known = {name: value for name, value in measured.values.items() if name in _METRICS}
    common = {"timestamp": instant(measured.taken_at), "source": measured.source}
    values = [{"name": name, "value": value, "numa_membw_values": None, **common} for name, value in known.items()]
    place = {"host": host, "host_ip": measured.host_ip, "nodename": measured.node}
    return Announcement(
        event="metrics.update",
        payload=versioned.as_object(
            "MetricsPayload",
            "1.0",
            {**place, "metrics": [versioned.as_object("MetricPayload", "1.0", value) for value in values]},
        ),
        source=COMPUTE,
        host=host,
        old_event="compute.metrics.update",
        old_payload={
            **place,
            "metrics": [
                {
                    "name": name,
                    "value": value / 100 if name in _SHARES else value,
                    "timestamp": with_fraction(measured.taken_at),
                    "source": measured.source,
                }
                for name, value in known.items()
            ],
        },
        old_publisher=f"compute.{measured.node}",
    )


# --- volumes -------------------------------------------------------------------------------------------------------


def volume_usage(usage: "VolumeUsage", host: str) -> Announcement:
    """Return the notification about what was read and written of a volume of a server on a host."""
    counters = {name: getattr(usage, name) for name in ("reads", "read_bytes", "writes", "write_bytes")}
    common = {"volume_id": usage.volume_id, "user_id": usage.user_id, "availability_zone": usage.availability_zone}
    data = {
        **common,
        **counters,
        "project_id": usage.project_id,
        "instance_uuid": usage.instance_uuid,
        "last_refreshed": instant(usage.refreshed_at),
    }
    return Announcement(
        event="volume.usage",
        payload=versioned.as_object("VolumeUsagePayload", "1.0", data),
        source=COMPUTE,
        host=host,
        old_event="volume.usage",
        old_payload={
            **common,
            **counters,
            "tenant_id": usage.project_id,
            "instance_id": usage.instance_uuid,
            "last_refreshed": spaced(usage.refreshed_at),
        },
        old_publisher=f"compute.{host}",
    )


# --- errors --------------------------------------------------------------------------------------------------------


def task_failed(method: str, row: InstanceRow, spec: "RequestSpec | None", fault: Fault) -> Announcement:
    """Return the notification that a conductor gave up work on a server, such as a build without a valid host."""
    data = {
        "instance_uuid": row["uuid"],
        "request_spec": None if spec is None else versioned.request_spec_payload(spec, (row["uuid"],)),
        "state": row["vm_state"],
        "reason": versioned.exception(fault),
    }
    old = {"request_spec": {}} if spec is None else unversioned.request_spec_payload(spec, (row["uuid"],))
    return Announcement(
        event=f"compute_task.{method}.error",
        payload=versioned.as_object("ComputeTaskPayload", "1.0", data),
        source=CONDUCTOR,
        failed=True,
        old_event=f"compute_task.{method}",
        old_payload={
            **old,
            "instance_properties": old["request_spec"].get("instance_properties", {}),
            "instance_id": row["uuid"],
            "state": row["vm_state"],
            "method": method,
            "reason": fault["message"],
        },
        old_publisher="compute_task",
    )


def host_failed(host: str, order: str, instance_uuid: str, error: OperationFailed) -> Announcement:
    """Return the notification that a host could not carry out an order."""
    data = {
        "module_name": "micronova.compute",
        "function_name": order,
        "exception": type(error).__name__,
        "exception_message": error.message,
        "traceback": str(error.details.get("details") or ""),
    }
    return Announcement(
        event="compute.exception",
        payload=versioned.as_object("ExceptionPayload", "1.1", data),
        source=COMPUTE,
        host=host,
        failed=True,
        old_event=order,
        old_payload={"exception": error.message, "args": {"instance": instance_uuid}},
        old_publisher=f"compute.{host}",
    )


def hypervisor_lost(host: str, host_ip: str, message: str) -> Announcement:
    """Return the notification that a host cannot reach its libvirt."""
    reason = {
        "module_name": "micronova.virt.libvirt.client.connection",
        "function_name": "_reconnect",
        "exception": "Unavailable",
        "exception_message": message,
        "traceback": "",
    }
    data = {"ip": host_ip, "reason": versioned.as_object("ExceptionPayload", "1.1", reason)}
    return Announcement(
        event="libvirt.connect.error",
        payload=versioned.as_object("LibvirtErrorPayload", "1.0", data),
        source=COMPUTE,
        host=host,
        failed=True,
        old_event="compute.libvirt.error",
        old_payload={"ip": host_ip, "method": "_connect", "reason": message},
        old_publisher=f"compute.{host}",
    )
