"""Settings that Nova has in its section DEFAULT."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class DefaultSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that Nova has in its section DEFAULT."""

    host: Annotated[
        str,
        Meta(
            description="Name of this machine in the cloud, and of a conductor or scheduler among services. Empty: the "
            "host name of the machine; the second conductor or scheduler of a machine is HOST-2. Set it if host names "
            "are not unique or may change, and to another name in each conductor and scheduler.",
            examples=["compute-17"],
        ),
    ] = ""
    state_path: Annotated[
        str,
        Meta(
            description="Directory of all files that survive a restart. Empty: /var/lib/micronova for root, else "
            "~/.local/state/micronova. Change it if that file system is small or not kept.",
            examples=["/srv/micronova"],
        ),
    ] = ""
    user: Annotated[
        str,
        Meta(
            description='System user that a cloud started by root runs as; created if it is missing. "root" keeps '
            "root's rights. Change it if the name is taken on this machine.",
        ),
    ] = "micronova"
    agent_user: Annotated[
        str,
        Meta(
            description="System user that the agents of a cloud with real guests run as, if root starts the cloud; "
            "created if it is missing. It may use libvirt, which is equivalent to root; default.user "
            "may not. Change it if the name is taken on this machine.",
        ),
    ] = "micronova-agent"
    volume_user: Annotated[
        str,
        Meta(
            description="System user that serves volumes to the guests of a cloud with real guests, if root starts "
            "the cloud; created if it is missing. It may use the files of volumes, and neither libvirt "
            "nor the databases. Change it if the name is taken on this machine.",
        ),
    ] = "micronova-volumes"
    secret_key: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            title="64 hex digits, as `openssl rand -hex 32` prints",
            description="Key of 64 hex digits that encrypts the secrets of waiting operations, the credentials that "
            "users keep in the embedded identity service, and the keys of encrypted volumes, which cannot be read with "
            "another key. All api, conductor, identity and volume processes need the same key; empty: from "
            "state_path. Set it if these roles run on several machines or in several directories.",
            examples=["64 hex digits, as `openssl rand -hex 32` prints"],
            extra={"secret": True},
        ),
    ] = ""
    other_secret_keys: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64}( [0-9a-f]{64})*)?$",
            title="keys of 64 hex digits, as `openssl rand -hex 32` prints, with spaces between",
            description="Further keys, separated by spaces, that decrypt what processes have encrypted with them; "
            "nothing is encrypted with these. Set it while default.secret_key is changed: first to the new key, then "
            "to the old one, as docs/operate.md says.",
            examples=["64 hex digits, as `openssl rand -hex 32` prints"],
            extra={"secret": True},
        ),
    ] = ""
    transport_url: Annotated[
        str,
        Meta(
            description="URL of the message bus: local:// in one process, amqp://USER:PASSWORD@HOST[,HOST…]/VHOST "
            "between processes. Set it if roles run in several processes.",
            examples=["amqp://micronova:SECRET@broker.example/"],
        ),
    ] = "local://"
    control_users: Annotated[
        tuple[str, ...],
        Meta(
            description="Broker users that may give orders and answer for services; the users of compute hosts may "
            "only report and answer for themselves. Empty: messages of all users are accepted, and "
            "every start logs a warning. Set it in every region, also on hosts.",
            examples=[["micronova"]],
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
            description="Seconds between heartbeats of a service. Longer intervals cost less and notice failures "
            "later. Conductors let compute hosts wait longer when there are more than 500 hosts for "
            "each second of this interval, up to a third of service_down_time. Raise it if heartbeats "
            "burden the database.",
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
    reserved_host_cpus: Annotated[
        int,
        Meta(ge=0, description="CPUs of each host that guests do not get. Raise it if the host runs other programs."),
    ] = 0
    reserved_huge_pages: Annotated[
        tuple[dict[str, Any], ...],
        Meta(
            description="Memory pages that a libvirt host keeps for itself: tables with node, size (in KiB) and "
            "count. Set it if other programs of the host use huge pages.",
            examples=[[{"node": 0, "size": 2048, "count": 64}]],
        ),
    ] = ()
    reserved_host_disk_mb: Annotated[
        int,
        Meta(
            ge=0,
            description="MiB of disk of each host that guests do not get. Raise it if the host keeps other files "
            "on that disk.",
        ),
    ] = 0
    cpu_allocation_ratio: Annotated[
        float,
        Meta(
            ge=0,
            description="Virtual CPUs that guests may have per CPU of a host, whatever the Placement API says. 0: the "
            "ratio is that of the host's inventory, which begins with initial_cpu_allocation_ratio and which the "
            "Placement API changes. Set it, and raise it if guests are mostly idle and do not fit.",
        ),
    ] = 0.0
    ram_allocation_ratio: Annotated[
        float,
        Meta(
            ge=0,
            description="MiB of memory that guests may have per MiB of a host; 0: as cpu_allocation_ratio. Above 1 the "
            "host may have to swap. Raise it only if guests leave much of their memory unused.",
        ),
    ] = 0.0
    disk_allocation_ratio: Annotated[
        float,
        Meta(
            ge=0,
            description="GiB of disk that guests may have per GiB of a host; 0: as cpu_allocation_ratio. Above 1 disks "
            "that fill up can exhaust the disk of the host. Raise it if guests leave much of their disks empty.",
        ),
    ] = 0.0
    initial_cpu_allocation_ratio: Annotated[
        float,
        Meta(
            gt=0,
            description="The ratio of virtual CPUs with which a new host begins, if cpu_allocation_ratio is 0. Set it "
            "if new hosts should have another one.",
        ),
    ] = 4.0
    initial_ram_allocation_ratio: Annotated[
        float, Meta(gt=0, description="The same for memory. Set it if new hosts should have another one.")
    ] = 1.0
    initial_disk_allocation_ratio: Annotated[
        float, Meta(gt=0, description="The same for disks. Set it if new hosts should have another one.")
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
            description="Guests that a host sends to other hosts by live migration at the same time; 0: no limit. "
            "The guests share the link of the host, so that several at once can fail where one after "
            "the other would succeed. Further migrations wait with the status `queued`. Raise it if "
            "the link is fast.",
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
            description="Monitors that measure hosts for the notification `metrics.update`, each time resources "
            "are reported; cpu.virt_driver measures the processors. Set it if a consumer of "
            "notifications wants them.",
            examples=[["cpu.virt_driver"]],
        ),
    ] = ()
    non_inheritable_image_properties: Annotated[
        tuple[str, ...],
        Meta(
            description="Properties of images that images of servers do not get from the server's image. Change it "
            "if images of servers have properties that are right for the first image only.",
        ),
    ] = ("cache_in_nova", "bittorrent")
    default_availability_zone: Annotated[
        str,
        Meta(
            description="Availability zone of hosts whose aggregates name none. Change it if users expect another name."
        ),
    ] = "nova"
    default_schedule_zone: Annotated[
        str | None,
        Meta(
            description="Availability zone of servers whose request names none; empty: any zone. Set it if servers "
            "should go to one zone unless users choose another.",
            examples=["nova"],
        ),
    ] = None
    default_access_ip_network_name: Annotated[
        str | None,
        Meta(
            description="Name of the network whose addresses become a server's accessIPv4 and accessIPv6; empty: none. "
            "Set it if clients should see one address of a server that has several.",
            examples=["public"],
        ),
    ] = None
    vif_plugging_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that a build waits until the network service reports the server's ports as "
            "plugged; 0: no wait. Raise it if the network service is slow; set it to 0 if that service "
            "sends no events.",
        ),
    ] = 300.0
    vif_plugging_is_fatal: Annotated[
        bool,
        Meta(
            description="Whether a build fails if the ports are not plugged within vif_plugging_timeout; else the "
            "guest starts anyway. Set it to false if guests may start before the network is ready.",
        ),
    ] = True
    shutdown_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that a guest has to shut down by itself before it is powered off. Raise it if "
            "guests take longer to stop their programs.",
        ),
    ] = 60.0
    resume_guests_state_on_host_boot: Annotated[
        bool | None,
        Meta(
            description="Whether a compute agent that starts also starts guests that should run and do not, such "
            "as those of a machine that was switched off. Servers that their owner has stopped stay "
            "stopped. Empty: yes in a cloud of micronova up, else no. Set it to true if servers should "
            "run again after a power cut.",
            examples=[True],
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
            "each other. The API reads it. Empty: yes in a cloud of micronova up, else no.",
            examples=[True],
        ),
    ] = None
    resize_confirm_window: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after which a resize that the owner of the server neither confirmed nor reverted "
            "is confirmed; 0: never. Set it if users forget to confirm, because both hosts keep the "
            "resources until then.",
        ),
    ] = 0.0
    instance_usage_audit: Annotated[
        bool,
        Meta(
            description="Whether conductors send instance.exists for every server of each audit period that has "
            "ended, for metering and billing. It needs a broker. Set it to true if a metering service "
            "needs these notifications.",
        ),
    ] = False
    instance_usage_audit_period: Annotated[
        str,
        Meta(
            pattern=r"^(hour(@[1-5]?[0-9])?|day(@(1?[0-9]|2[0-3]))?|month(@(1?[0-9]|2[0-8]))?|year(@([0-9]|1[0-2]))?)$",
            description="Audit period: hour, day, month or year (UTC), with @ and a number if it begins later: "
            "hour@30 at half past, day@18 at 18:00, month@15 on the 15th, year@4 in April. Change it "
            "to the period of your bills.",
        ),
    ] = "month"
    reimage_timeout_per_gb: Annotated[
        int,
        Meta(
            ge=1,
            description="Seconds for each GiB of a server's root volume that a rebuild waits until the volume service "
            "has written the image to it, if that is more than cinder.creation_timeout. Raise it if the storage is "
            "slow; instance_build_timeout limits the whole rebuild.",
        ),
    ] = 20
    instance_build_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds after which an operation on a server (a build, a move or another action) that has "
            "not ended fails; in Nova the setting limits builds only. A build then puts the server in "
            "ERROR; most actions leave the state of the server as it was. Deletes, and what is being "
            "undone, have no such limit. Raise it if images are large or disks are slow.",
        ),
    ] = 3600.0
    reclaim_instance_interval: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds for which a deleted server is kept, switched off, and can be restored; 0: it is "
            "deleted at once. The API and the conductors read it. Set it if users delete servers by "
            "mistake.",
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
    instance_delete_interval: Annotated[
        float,
        Meta(
            ge=-1,
            description="Seconds between two looks for guests that hosts should have removed and have not, such as "
            "after a migration that failed; 0: a minute, -1: never. Hosts try again by themselves. Set it for "
            "conductors, lower if the log and `micronova status` should tell of such guests sooner.",
        ),
    ] = 300.0
    volume_usage_poll_interval: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds between two notifications volume.usage about each volume of a server that runs; one "
            "more is sent when a volume is detached. 0: none are sent. Set it for conductors, for example to 300, if "
            "you meter what servers read and write of their volumes.",
        ),
    ] = 0.0
    running_deleted_instance_action: Annotated[
        str,
        Meta(
            pattern="^(reap|shutdown|log|noop)$",
            description="What conductors do with guests of servers that are deleted: reap (remove the guest), "
            "shutdown (switch the guest off and keep it), log, or noop. Set it to log if you want to "
            "look at such guests first.",
        ),
    ] = "reap"
    running_deleted_instance_poll_interval: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds between two looks for guests of servers that are deleted; 0: never. Lower it if "
            "such guests should be found sooner.",
        ),
    ] = 1800.0
    running_deleted_instance_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after the deletion of a server from which on a guest of that server counts as "
            "left over. Raise it if such guests should be kept for a while.",
        ),
    ] = 0.0
    shelved_offload_time: Annotated[
        int,
        Meta(
            ge=-1,
            description="Seconds after which a shelved server leaves the host; image, addresses and quota of the "
            "server are kept. 0: at once; -1: only when an admin asks to offload the server. Set it "
            "for conductors.",
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
            description="Lowest level that is logged: DEBUG, INFO, WARNING or ERROR. SIGHUP changes it at run time. "
            "Set it to DEBUG to look for the cause of an error.",
        ),
    ] = "INFO"
    default_log_levels: Annotated[
        tuple[Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_.]*=(DEBUG|INFO|WARNING|ERROR)$")], ...],
        Meta(
            description="Lowest levels of single modules, as MODULE=LEVEL; a module is named as in the lines of the "
            "log, with or without its last parts. Other modules have log_level. SIGHUP changes it at run time. Set "
            "it to look for the cause of an error in one part, or to silence another.",
            examples=[["conductor=DEBUG", "rpc.amqp=WARNING"]],
        ),
    ] = ()
    log_file: Annotated[
        str,
        Meta(
            description="File that the process appends its log to, which SIGHUP opens anew after a rotation. Empty: "
            "standard error, which systemd takes. Processes of one machine have a file each. Set it if the machine "
            "has no journal.",
            examples=["/var/log/micronova/api.log"],
        ),
    ] = ""
    log_format: Annotated[
        str,
        Meta(
            pattern="^(text|json)$",
            description="Format of the log: text for people, json for one JSON object per line. Set it to json if "
            "another program collects the logs.",
        ),
    ] = "text"
    log_file_max_size: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of DIR/micronova.log, the log of `up --detach`, above which the first half of the "
            "file is removed; 0: no limit. Raise it if the log has to go back further.",
        ),
    ] = 104_857_600

    def fixed_allocation_ratios(self) -> dict[str, float]:
        """Return the allocation ratios that hosts have whatever their inventories say, by resource class."""
        fixed = {
            "VCPU": self.cpu_allocation_ratio,
            "MEMORY_MB": self.ram_allocation_ratio,
            "DISK_GB": self.disk_allocation_ratio,
        }
        return {name: ratio for name, ratio in fixed.items() if ratio}

    def initial_allocation_ratios(self) -> dict[str, float]:
        """Return the allocation ratios that new hosts have, by resource class."""
        initial = {
            "VCPU": self.initial_cpu_allocation_ratio,
            "MEMORY_MB": self.initial_ram_allocation_ratio,
            "DISK_GB": self.initial_disk_allocation_ratio,
        }
        return initial | self.fixed_allocation_ratios()
