"""Settings that Nova has in its section DEFAULT."""

from typing import Annotated

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
    secret_key: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description="64 hex digits that encrypt the secrets of waiting operations. All api and conductor "
            "processes need the same; empty: from state_path.",
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
            ge=0, description="Builds that run at the same time on one host; 0: no limit. Lower it if the disk is slow."
        ),
    ] = 10
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
    instance_build_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds after which an operation that has not ended fails. "
            "A build then puts its server in ERROR; most actions leave its state as it was.",
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
