"""What the audit finds, and the repairs that take it away."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec
import sqlalchemy as sa

from micronova.clients.image.client import ImageClient
from micronova.clients.network.client import NetworkClient
from micronova.clients.volume.client import VolumeClient
from micronova.compute.rpcapi import ComputeAPI
from micronova.db import operations as operation_rows
from micronova.db.engine import Database
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict, Unavailable
from micronova.objects.pci_devices import Alias

FindingKind = Literal[
    "allocation", "conductor", "fault", "guest", "host", "image", "migration", "network", "operation", "oversold",
    "port", "quota", "stuck", "topology", "unasked", "volume",
]  # fmt: skip
"""What a finding is about."""

UNASKED: Final = "unasked"
"""The kind of a finding that names what did not answer, and so was not compared."""


class Repair(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change that takes a finding away. Before it is made, it is checked whether it is still right."""

    name: str  # a key of `REPAIRS` in `conductor/repairs.py`
    text: str  # what it does
    about: dict[str, str | int] = {}  # what it is done to: the fields of the struct of its `RepairKind`
    destroys: bool = False  # data may be lost: it is made only if an operator asks for just this one


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One contradiction or leak."""

    kind: FindingKind
    subject: str  # a server, a host, a project…
    message: str
    repairs: tuple[Repair, ...] = ()  # the first is the one to choose without further knowledge
    advice: str = ""  # what a person should do, if there is no repair


@dataclass(kw_only=True)
class RepairDependencies:
    """What repairs are made with."""

    database: Database
    clock: Clock
    random: Random
    compute: ComputeAPI | None = None
    network_client: NetworkClient | None = None
    image_client: ImageClient | None = None
    volume_client: VolumeClient | None = None
    pci_aliases: Mapping[str, Alias] = field(default_factory=dict)

    def now(self) -> int:
        """Return the time in microseconds."""
        return micros(self.clock.now())

    def hosts(self) -> ComputeAPI:
        """Return the client of the hosts; raise Unavailable without a broker."""
        if self.compute is None:
            raise Unavailable("The broker does not answer, so that no host can be asked.")
        return self.compute


A = TypeVar("A", bound=msgspec.Struct)


@dataclass(frozen=True)
class RepairKind(Generic[A]):
    """A kind of repairs, by a name in the table `REPAIRS` of its module."""

    about: type[A]  # what each is done to
    run: Callable[[RepairDependencies, A], Awaitable[str]]  # returns what it has changed; "" if nothing is to be done


Repairs = Mapping[str, RepairKind[Any]]


def offer(name: str, about: msgspec.Struct, text: str, *, destroys: bool = False) -> Repair:
    """Return a repair, which operators are asked about by its text."""
    return Repair(name=name, text=text, about=msgspec.to_builtins(about), destroys=destroys)


def refuse_busy(conn: sa.Connection, server: str) -> None:
    """Raise Conflict if an operation works on a server: it decides what the server is like afterwards."""
    for row in operation_rows.open_of(conn, server):
        raise Conflict(
            f"Operation {row['id']} ({row['kind']}) works on server {server}: try again when it has ended, or see "
            f"`micronova operation show {row['id']}`."
        )
