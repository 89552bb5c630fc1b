"""Settings that Nova has in its section DEFAULT."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class DefaultSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that Nova has in its section DEFAULT."""

    host: Annotated[
        str,
        Meta(
            description="Name of this machine in the cloud. Empty: its host name. Set it if "
            "host names are not unique or may change."
        ),
    ] = ""
    state_path: Annotated[
        str,
        Meta(
            description="Directory of all files that survive a restart. Empty: /var/lib/micronova "
            "for root, else ~/.local/state/micronova."
        ),
    ] = ""
    user: Annotated[
        str,
        Meta(
            description='System user that a cloud started by root runs as; created if it is missing. "root" keeps '
            "root's rights."
        ),
    ] = "micronova"
    agent_user: Annotated[
        str,
        Meta(
            description="System user that the agents of a cloud with real guests run as, if root starts the cloud; "
            "created if it "
            "is missing. It may use libvirt, which is equivalent to root; default.user may not."
        ),
    ] = "micronova-agent"
    volume_user: Annotated[
        str,
        Meta(
            description="System user that serves volumes to the guests of a cloud with real guests, if root starts the "
            "cloud; created if it is missing. It may use the files of volumes, and neither libvirt nor the databases."
        ),
    ] = "micronova-volumes"
    secret_key: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description="64 hex digits that encrypt the secrets of waiting operations, and the credentials that users "
            "keep in the embedded identity service, which cannot be read with another key. All api, conductor and "
            "identity processes need the same; empty: from state_path.",
        ),
    ] = ""
    transport_url: Annotated[
        str,
        Meta(
            description="URL of the message bus: local:// in one process, "
            "amqp://USER:PASSWORD@HOST[,HOST…]/VHOST between processes."
        ),
    ] = "local://"
    control_users: Annotated[
        tuple[str, ...],
        Meta(
            description="Broker users that may give orders and answer for services; the users of compute hosts may "
            "only report and "
            "answer for themselves. Empty: messages of all users are accepted, and every start logs a warning."
        ),
    ] = ()
    control_exchange: Annotated[
        str,
        Meta(
            description="Exchange of the broker that notifications are published to. Change it if listeners expect "
            "another name."
        ),
    ] = "nova"
    report_interval: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds between heartbeats of a service. Longer intervals "
            "cost less and notice failures later. Conductors let compute hosts wait longer when there are more than "
            "500 for each second of it, up to a third of service_down_time.",
        ),
    ] = 5.0
    service_down_time: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds without a heartbeat after which a service is down. Keep it "
            "at three report_intervals or more. With thousands of hosts, 60 lets heartbeats be rarer; set "
            "conductor.lease to the same.",
        ),
    ] = 20.0
    reserved_host_memory_mb: Annotated[
        int,
        Meta(
            ge=0,
            description="MiB of memory of each host that guests do not get. Raise it if the host runs other programs.",
        ),
    ] = 512
    reserved_host_cpus: Annotated[int, Meta(ge=0, description="CPUs of each host that guests do not get.")] = 0
    reserved_huge_pages: Annotated[
        tuple[dict[str, Any], ...],
        Meta(
            description="Memory pages that a libvirt host keeps for itself: tables with node, size (in KiB) and count. "
            "Set it if other programs of the host use huge pages."
        ),
    ] = ()
    reserved_host_disk_mb: Annotated[
        int, Meta(ge=0, description="MiB of disk of each host that guests do not get.")
    ] = 0
    cpu_allocation_ratio: Annotated[
        float,
        Meta(
            gt=0,
            description="Virtual CPUs that guests may have per CPU of a host. Raise it if "
            "guests are mostly idle and do not fit.",
        ),
    ] = 4.0
    ram_allocation_ratio: Annotated[
        float,
        Meta(
            gt=0, description="MiB of memory that guests may have per MiB of a host. Above 1 the host may have to swap."
        ),
    ] = 1.0
    disk_allocation_ratio: Annotated[
        float,
        Meta(
            gt=0,
            description="GiB of disk that guests may have per GiB of a host. Above 1 disks "
            "that fill up can exhaust the host's.",
        ),
    ] = 1.0
    max_concurrent_builds: Annotated[
        int,
        Meta(
            ge=0,
            description="Builds that run at the same time on one host, one fewer of one project; 0: no limit. "
            "Lower it if the disk is slow.",
        ),
    ] = 10
    max_concurrent_live_migrations: Annotated[
        int,
        Meta(
            description="How many guests a host sends to other hosts by live migration at the same time; 0: no limit. "
            "They share its link, so that several at once can all fail where one after the other would succeed. Others "
            "wait, and their migrations are `queued`",
            ge=0,
        ),
    ] = 1
    max_concurrent_snapshots: Annotated[
        int,
        Meta(
            ge=0,
            description="Images of servers that one host makes and uploads at the same time, one fewer of one project; "
            "0: no limit. Lower it if the disk or the network is slow.",
        ),
    ] = 5
    compute_monitors: Annotated[
        tuple[Literal["cpu.virt_driver"], ...],
        Meta(
            description="Monitors that measure hosts for the notification `metrics.update`, each time resources are "
            "reported; cpu.virt_driver measures the processors. Set it if a consumer of notifications wants them."
        ),
    ] = ()
    non_inheritable_image_properties: Annotated[
        tuple[str, ...],
        Meta(description="Properties of images that images of servers do not get from the server's image."),
    ] = ("cache_in_nova", "bittorrent")
    default_availability_zone: Annotated[
        str, Meta(description="Availability zone of hosts whose aggregates name none.")
    ] = "nova"
    default_schedule_zone: Annotated[
        str | None, Meta(description="Availability zone of servers whose request names none; empty: any zone.")
    ] = None
    default_access_ip_network_name: Annotated[
        str | None,
        Meta(
            description="Name of the network whose addresses become a server's accessIPv4 and accessIPv6; empty: none."
        ),
    ] = None
    vif_plugging_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that a build waits until the network service reports its "
            "ports as plugged; 0: it does not wait.",
        ),
    ] = 300.0
    vif_plugging_is_fatal: Annotated[
        bool,
        Meta(
            description="Whether a build fails if the ports are not plugged within "
            "vif_plugging_timeout; else the guest starts anyway."
        ),
    ] = True
    shutdown_timeout: Annotated[
        float, Meta(ge=0, description="Seconds that a guest has to shut down by itself before it is powered off.")
    ] = 60.0
    resume_guests_state_on_host_boot: Annotated[
        bool | None,
        Meta(
            description="Whether a compute agent that starts also starts guests that should run and do not, such as "
            "those of a "
            "machine that was switched off. Servers that their owner has stopped stay stopped. "
            "Empty: yes in a cloud of micronova up, else no."
        ),
    ] = None
    rescue_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after which a server that is still rescued is unrescued; 0: never. "
            "Set it for conductors.",
        ),
    ] = 0.0
    allow_resize_to_same_host: Annotated[
        bool | None,
        Meta(
            description="Whether a resize may keep a server on its host. Set it where hosts cannot send servers to "
            "each other. The API reads it. Empty: yes in a cloud of micronova up, else no."
        ),
    ] = None
    resize_confirm_window: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after which a resize that its owner neither confirmed nor reverted is confirmed. "
            "0: never.",
        ),
    ] = 0.0
    instance_usage_audit: Annotated[
        bool,
        Meta(
            description="Whether conductors send instance.exists for every server of each audit period that has ended, "
            "for metering and billing. It needs a broker."
        ),
    ] = False
    instance_usage_audit_period: Annotated[
        str,
        Meta(
            pattern=r"^(hour(@[1-5]?[0-9])?|day(@(1?[0-9]|2[0-3]))?|month(@(1?[0-9]|2[0-8]))?|year(@([0-9]|1[0-2]))?)$",
            description="Audit period: hour, day, month or year (UTC), with @ and a number if it begins later: hour@30 "
            "at half past, day@18 at 18:00, month@15 on the 15th, year@4 in April.",
        ),
    ] = "month"
    instance_build_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds after which an operation on a server (a build, a move or another action) that has not "
            "ended fails; in Nova it limits builds only. A build then puts its server in ERROR; most actions leave "
            "its state as it was. Deletes, and what is being undone, have no such limit.",
        ),
    ] = 3600.0
    reclaim_instance_interval: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds for which a deleted server is kept, switched off, and can be restored; 0: it is "
            "deleted at once. The API and the conductors read it.",
        ),
    ] = 0.0
    heal_instance_info_cache_interval: Annotated[
        float,
        Meta(
            ge=-1,
            description="Seconds between two runs that read the interfaces of servers, at least 100 at a time, anew "
            "from the network service; 0 or less: never. Set it for conductors if that service does not tell by events "
            "what changes.",
        ),
    ] = -1.0
    running_deleted_instance_action: Annotated[
        str,
        Meta(
            pattern="^(reap|shutdown|log|noop)$",
            description="What conductors do with guests of servers that are deleted: reap (they are removed), shutdown "
            "(they are switched off and stay), log, or noop.",
        ),
    ] = "reap"
    running_deleted_instance_poll_interval: Annotated[
        float,
        Meta(ge=0, description="Seconds between two looks for guests of servers that are deleted; 0: never."),
    ] = 1800.0
    running_deleted_instance_timeout: Annotated[
        float,
        Meta(ge=0, description="Seconds after its deletion from which on a server's guest counts as left over."),
    ] = 0.0
    shelved_offload_time: Annotated[
        int,
        Meta(
            ge=-1,
            description="Seconds after which a shelved server leaves its host: it keeps its image, addresses and "
            "quota. 0: at once; -1: only when an admin asks for it. Set it for conductors.",
        ),
    ] = 0
    shelved_poll_interval: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds between two looks for servers that have been shelved for longer than "
            "shelved_offload_time, if that is above 0. Set it for conductors.",
        ),
    ] = 3600.0
    log_level: Annotated[
        str,
        Meta(
            pattern="^(DEBUG|INFO|WARNING|ERROR)$",
            description="Lowest level that is logged: DEBUG, INFO, WARNING or ERROR.",
        ),
    ] = "INFO"
    log_format: Annotated[
        str,
        Meta(
            pattern="^(text|json)$",
            description="Format of the log: text for people, json for one JSON object per line.",
        ),
    ] = "text"
    log_file_max_size: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of DIR/micronova.log, the log of `up --detach`, above which its first half is removed; "
            "0: no limit.",
        ),
    ] = 104_857_600
