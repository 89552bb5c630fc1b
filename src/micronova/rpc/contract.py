"""How a role declares its messages: methods with typed parameters and results, interfaces, targets, versions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import msgspec

from micronova.objects.context import Context

P = TypeVar("P")
R = TypeVar("R")

Handler = Callable[[Context, Any], Awaitable[Any]]
"""Handles one method: takes the context and the decoded parameters, returns the result."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a message goes: any server of a topic, or the one on a host."""

    topic: str
    host: str | None = None


def parse_version(version: str) -> tuple[int, int]:
    """Return (1, 4) for "1.4"."""
    major, _, minor = version.partition(".")
    try:
        return int(major), int(minor)
    except ValueError:
        raise ValueError(f"a contract version looks like 1.0, not {version!r}") from None


def is_compatible(needed: str, offered: str) -> bool:
    """Return whether a side that offers one version understands a message that needs another one.

    The major version must be the same, the needed minor version not newer.
    """
    needed_major, needed_minor = parse_version(needed)
    major, minor = parse_version(offered)
    return needed_major == major and needed_minor <= minor


class Method(Generic[P, R]):
    """One message: its name, the types of its parameters and its result, and its first contract version."""

    interface: Interface
    label: str
    """Topic and name, as statistics and logs show them: conductor.run_operations."""

    @overload
    def __init__(
        self: Method[P, None],
        name: str,
        params: type[P],
        result: None = None,
        *,
        since: str = "1.0",
        expires: float | None = None,
    ) -> None: ...

    @overload
    def __init__(self, name: str, params: type[P], result: type[R], *, since: str = "1.0") -> None: ...

    def __init__(
        self, name: str, params: type[P], result: Any = None, *, since: str = "1.0", expires: float | None = None
    ) -> None:
        """Casts that have waited for `expires` seconds are dropped; None: they wait for ever."""
        parse_version(since)
        self.name = name
        self.params = params
        self.result = result
        self.since = since
        self.expires = expires
        self.label = name
        self.decode_params = msgspec.msgpack.Decoder(params).decode
        self.decode_result = msgspec.msgpack.Decoder(result).decode

    def __repr__(self) -> str:
        return f"<Method {self.label} since {self.since}>"


class Interface:
    """The messages of a topic in one namespace, with the newest contract version that this code knows."""

    def __init__(
        self,
        topic: str,
        *,
        namespace: str = "",
        version: str = "1.0",
        methods: Iterable[Method[Any, Any]] = (),
        from_hosts: bool = False,
    ) -> None:
        """`from_hosts`: compute hosts may send these messages; the handler checks which instances they concern."""
        parse_version(version)
        self.topic = topic
        self.namespace = namespace
        self.version = version
        self.from_hosts = from_hosts
        self.methods: dict[str, Method[Any, Any]] = {}
        for method in methods:
            self._add(method)

    @overload
    def method(
        self, name: str, params: type[P], result: None = None, *, since: str = "1.0", expires: float | None = None
    ) -> Method[P, None]: ...

    @overload
    def method(self, name: str, params: type[P], result: type[R], *, since: str = "1.0") -> Method[P, R]: ...

    def method(
        self, name: str, params: type[P], result: Any = None, *, since: str = "1.0", expires: float | None = None
    ) -> Method[P, Any]:
        """Declare a method of this interface."""
        method: Method[P, Any] = Method(name, params, result, since=since, expires=expires)
        self._add(method)
        return method

    def target(self, host: str | None = None) -> Target:
        """Return the target of this interface's messages: any of its servers, or the one on a host."""
        return Target(self.topic, host)

    def _add(self, method: Method[Any, Any]) -> None:
        if method.name in self.methods or hasattr(method, "interface"):
            raise ValueError(f"{method.name} is declared twice")
        if not is_compatible(method.since, self.version):
            raise ValueError(f"{method.name} is newer ({method.since}) than its interface ({self.version})")
        method.interface = self
        method.label = f"{self.topic}.{method.name}"
        self.methods[method.name] = method

    def __repr__(self) -> str:
        return f"<Interface {queue_name(self.topic, self.namespace)} {self.version}>"


def queue_name(topic: str, namespace: str, host: str | None = None) -> str:
    """Return the name of the work queue of a topic's namespace, shared by its servers or of the one on a host.

    Each namespace has its own queue: many messages in one (builds) do not delay another (heartbeats), and a process
    can start to serve them one after the other without receiving messages that it cannot handle yet.
    """
    shared = f"{topic}:{namespace}" if namespace else topic
    return f"{shared}.{host}" if host else shared
