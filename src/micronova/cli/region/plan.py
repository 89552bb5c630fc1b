"""The plan of a region: which processes there are, where they listen, and where their files are.

DIR/region.json       the plan, which `region up` and `region down` read
DIR/etc/              the settings of the control nodes: micronova.toml, NAME.env for each process, tls/
DIR/hosts/            the settings of compute hosts, a file for each
DIR/state/NAME/       the directory of each process of a trial
"""

import ipaddress
from pathlib import Path

import msgspec

from micronova.cli.names import HTTP_ROLES
from micronova.objects.errors import MicronovaError

USUAL_PORTS = {
    "identity": 5000,
    "api": 8774,
    "image": 9292,
    "network": 9696,
    "volume": 8776,
    "metadata": 8775,
    "console": 6083,
    "database": 5432,
    "broker": 5672,
    "epmd": 24369,  # these two are for the private broker of a trial, beside one of the system's
    "distribution": 25673,
}
"""The port of each process; the roles have those that OpenStack's services have."""
TLS_BROKER = 5671
PATHS = {
    "identity": "/identity/v3",
    "compute": "/compute/v2.1",
    "image": "/image",
    "network": "/network",
    "volume": "/volume/v3",
    "placement": "/placement",
    "metadata": "/metadata",
    "console": "/console",
}
"""Where each service is below the URL of its process."""


class RegionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What `region init` was told."""

    directory: Path
    config_directory: Path  # where DIR/etc is on the machines
    address: str = "127.0.0.1"  # of the control node, for clients and hosts
    public_url: str = ""  # of a proxy in front of all services
    first_port: int | None = None
    database: str = ""  # HOST[:PORT]
    broker: str = ""  # HOST[:PORT][,HOST[:PORT]…]
    hosts: tuple[str, ...] = ()
    driver: str = "libvirt"
    conductors: int = 2
    schedulers: int = 2
    region_name: str = "RegionOne"
    tls: bool = False

    @property
    def etc(self) -> Path:
        """The settings of control nodes."""
        return self.directory / "etc"

    @property
    def settings(self) -> Path:
        """The settings that all processes of control nodes share."""
        return self.etc / "micronova.toml"

    @property
    def hosts_directory(self) -> Path:
        """The settings of compute hosts."""
        return self.directory / "hosts"

    @property
    def authority(self) -> Path:
        """The certificate of the region's own authority."""
        return self.etc / "tls" / "ca.pem"

    @property
    def certificate(self) -> Path:
        """The certificate of the control nodes, the broker and the database."""
        return self.authority.with_name("certificate.pem")

    @property
    def certificate_key(self) -> Path:
        """The key of that certificate."""
        return self.authority.with_name("key.pem")

    def state(self, process: str) -> Path:
        """Return the directory of a process of a trial."""
        return self.directory / "state" / process

    @property
    def on_one_machine(self) -> bool:
        """Whether all of the region is on this machine, reachable from nowhere else."""
        return all(is_loopback(place) for place in self._places)

    @property
    def is_for_trial(self) -> bool:
        """Whether `region up` can run it: its database and its broker listen on 127.0.0.1."""
        return self.driver == "fake" and self._places <= {"127.0.0.1", "localhost"}

    @property
    def _places(self) -> set[str]:
        return {self.address, *map(host_of, (*self.brokers, self.database_place))}

    @property
    def listen(self) -> str:
        """The address on which services listen: all addresses if clients are on other machines."""
        try:
            address = ipaddress.ip_address(self.address.strip("[]"))
        except ValueError:
            return "127.0.0.1" if is_loopback(self.address) else "0.0.0.0"  # noqa: S104
        if address.is_loopback:
            return str(address)
        return "0.0.0.0" if address.version == 4 else "::"  # noqa: S104

    def port(self, name: str) -> int:
        """Return the port of a process."""
        if self.first_port is not None:
            return self.first_port + list(USUAL_PORTS).index(name)
        return TLS_BROKER if name == "broker" and self.tls else USUAL_PORTS[name]

    @property
    def database_place(self) -> str:
        """HOST:PORT of PostgreSQL."""
        return _with_port(self.database or self.address, self.port("database"))

    @property
    def brokers(self) -> list[str]:
        """HOST:PORT of each broker."""
        return [_with_port(place, self.port("broker")) for place in (self.broker or self.address).split(",")]

    @property
    def processes(self) -> dict[str, str]:
        """The role of each process of the control node, by the name of the process."""
        numbered = {
            f"{role}-{number}": role
            for role, count in (("conductor", self.conductors), ("scheduler", self.schedulers))
            for number in range(1, count + 1)
        }
        roles = ("identity", "image", "network", "volume")
        return {**{role: role for role in roles}, **numbered, **{role: role for role in ("api", "metadata", "console")}}

    def process_url(self, role: str) -> str:
        """Return the URL at which the process of a role listens; http and https are the same for all."""
        scheme = "https" if self.tls else "http"
        return f"{scheme}://{_with_port(self.address, self.port(role))}"

    def url(self, service: str) -> str:
        """Return the URL by which other services reach a service."""
        role = "api" if service in ("compute", "placement") else service
        return self.process_url(role) + PATHS[service]

    def seen_by_clients(self, service: str) -> str:
        """Return the URL by which clients reach a service."""
        return self.public_url + PATHS[service] if self.public_url else self.url(service)

    def serves_http(self, process: str) -> bool:
        """Return whether a process listens on a port of its own."""
        return self.processes[process] in HTTP_ROLES


def write_plan(plan: RegionPlan) -> None:
    """Write the plan into the directory of its region."""
    text = msgspec.json.encode(plan, enc_hook=str)  # paths
    (plan.directory / "region.json").write_bytes(msgspec.json.format(text, indent=2))


def read_plan(directory: Path) -> RegionPlan:
    """Return the plan of the region in DIR."""
    directory = directory.absolute()
    file = directory / "region.json"
    try:
        plan = msgspec.json.decode(file.read_bytes(), type=RegionPlan, dec_hook=lambda kind, text: kind(text))
    except FileNotFoundError:
        raise MicronovaError(
            f"There is no region in {directory}: `micronova region init --dir {directory}` makes one."
        ) from None
    except msgspec.MsgspecError as error:
        raise MicronovaError(f"{file} is damaged: {error}.") from None
    return msgspec.structs.replace(plan, directory=directory)


def host_of(place: str) -> str:
    """Return HOST of HOST:PORT."""
    return place.rpartition(":")[0]


def is_loopback(host: str) -> bool:
    """Return whether an address, or localhost, is one of this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_name(host: str) -> bool:
    """Return whether a host is named, and not given by its address."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return True
    return False


def _with_port(place: str, port: int) -> str:
    """Return HOST:PORT of a place that may name a port."""
    host = place
    if place.count(":") > 1 and not place.startswith("["):  # a bare IPv6 address
        host = f"[{place}]"
    has_port = host.rpartition("]")[2].count(":") == 1
    return host if has_port else f"{host}:{port}"
