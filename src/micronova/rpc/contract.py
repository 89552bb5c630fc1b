"""What rooms say about their messages: methods, interfaces, targets, and the context that rides with each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import msgspec

P = TypeVar("P")
R = TypeVar("R")


class Context(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who asked, within which request, and until when; travels with every message."""

    request_id: str = ""
    user_id: str = ""
    project_id: str = ""
    roles: tuple[str, ...] = ()
    traceparent: str = ""
    deadline: float = 0.0
    """Absolute wall time after which nobody waits for the answer any more; 0 is never. Casts do not carry it."""
    sender: str = ""
    """Who really sent the message, as the transport has verified it; what the sender writes here is overwritten."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a message goes: any server of a topic, or the one on that host."""

    topic: str
    host: str | None = None


def parse_version(version: str) -> tuple[int, int]:
    """Give "1.4" as (1, 4)."""
    major, _, minor = version.partition(".")
    try:
        return int(major), int(minor)
    except ValueError:
        raise ValueError(f"a contract version looks like 1.0, not {version!r}") from None


def fits(wanted: str, offered: str) -> bool:
    """Say whether a side that offers one version understands what needs the other: same major, minor not newer."""
    wanted_major, wanted_minor = parse_version(wanted)
    major, minor = parse_version(offered)
    return wanted_major == major and wanted_minor <= minor


class Method(Generic[P, R]):
    """One message, declared once: its name, what it carries, what comes back, and since which contract version."""

    interface: Interface
    label: str
    """Topic and name, as shown in statistics and logs: conductor.build_instances."""

    @overload
    def __init__(
        self: Method[P, None],
        name: str,
        params: type[P],
        result: None = None,
        *,
        since: str = "1.0",
    ) -> None: ...

    @overload
    def __init__(self, name: str, params: type[P], result: type[R], *, since: str = "1.0") -> None: ...

    def __init__(self, name: str, params: type[P], result: Any = None, *, since: str = "1.0") -> None:
        parse_version(since)
        self.name = name
        self.params = params
        self.result = result
        self.since = since
        self.label = name
        self.decode_params = msgspec.msgpack.Decoder(params).decode
        self.decode_result = msgspec.msgpack.Decoder(result).decode

    def __repr__(self) -> str:
        return f"<Method {self.label} since {self.since}>"


class Interface:
    """The messages that a topic takes in one namespace, with the newest contract version this code knows."""

    def __init__(
        self,
        topic: str,
        *,
        namespace: str = "",
        version: str = "1.0",
        methods: Iterable[Method[Any, Any]] = (),
        from_hosts: bool = False,
    ) -> None:
        """`from_hosts`: compute hosts may send these; the handler checks for whom they speak."""
        parse_version(version)
        self.topic = topic
        self.namespace = namespace
        self.version = version
        self.from_hosts = from_hosts
        self.methods: dict[str, Method[Any, Any]] = {}
        for method in methods:
            self._add(method)

    @overload
    def method(self, name: str, params: type[P], result: None = None, *, since: str = "1.0") -> Method[P, None]: ...

    @overload
    def method(self, name: str, params: type[P], result: type[R], *, since: str = "1.0") -> Method[P, R]: ...

    def method(self, name: str, params: type[P], result: Any = None, *, since: str = "1.0") -> Method[P, Any]:
        """Declare a method of this interface."""
        method: Method[P, Any] = Method(name, params, result, since=since)
        self._add(method)
        return method

    def target(self, host: str | None = None) -> Target:
        """Give the address of this interface's servers, or of the one on a host."""
        return Target(self.topic, host)

    def _add(self, method: Method[Any, Any]) -> None:
        if method.name in self.methods or hasattr(method, "interface"):
            raise ValueError(f"{method.name} is declared twice")
        if not fits(method.since, self.version):
            raise ValueError(f"{method.name} is newer ({method.since}) than its interface ({self.version})")
        method.interface = self
        method.label = f"{self.topic}.{method.name}"
        self.methods[method.name] = method

    def __repr__(self) -> str:
        return f"<Interface {address(self.topic, self.namespace)} {self.version}>"


def address(topic: str, namespace: str, host: str | None = None) -> str:
    """Name the work queue of a topic, of one of its namespaces, or of one host.

    Each namespace has a queue of its own: a flood in one (builds) does not hold up another (heartbeats), and a
    process may begin to serve them one after the other without ever receiving a message it cannot handle yet.
    """
    place = f"{topic}:{namespace}" if namespace else topic
    return f"{place}.{host}" if host else place
