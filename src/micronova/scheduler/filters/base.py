"""The contract of a filter: a mask over the hosts it is shown.

To add one: subclass `HostFilter` (or `EachHost`, if it needs Python per host), give it the narrowest `scope`
that is true, name it in `filters/registry.py` or as an entry point of `micronova.filters`, and enable it.
"""

import enum
from abc import ABC, abstractmethod
from typing import ClassVar

import msgspec
import numpy as np

from micronova.objects.scheduling import HostState, RequestSpec
from micronova.scheduler.host_table import Bools, HostView


class Scope(enum.Enum):
    """Whose verdict, or weight, may be another after one instance of a request was placed on some host."""

    REQUEST = "request"  # nobody's: asked once per request
    HOST = "host"  # only that of the host: asked again for it alone
    ALL = "all"  # anybody's: asked again for all


class FilterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that filters are made with."""

    service_down_time: float = 60.0


class HostFilter(ABC):
    """Says which hosts can take an instance of a request."""

    name: ClassVar[str] = ""
    scope: ClassVar[Scope] = Scope.ALL
    covers: ClassVar[frozenset[str]] = frozenset()  # resource classes whose room this filter checks

    def __init__(self, options: FilterOptions) -> None:
        self.options = options

    @abstractmethod
    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        """Give True for each host that passes; None if the request does not concern this filter."""


class EachHost(HostFilter):
    """A filter that looks at hosts one at a time, as objects: simple to write, and as slow as Python."""

    @abstractmethod
    def passes(self, host: HostState, spec: RequestSpec) -> bool:
        """Say whether this host can take an instance of the request."""

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        return np.fromiter((self.passes(hosts.state(p), spec) for p in range(len(hosts))), np.bool_, len(hosts))
