"""The contract of a filter: hosts in, a mask over them out. CONTRIBUTING.md has the checklist to add one."""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, cast

import msgspec
import numpy as np

from micronova.conf.control import FilterSchedulerSettings, MetricsSettings
from micronova.objects.pci_devices import Alias
from micronova.objects.scheduling import HostState, RequestSpec
from micronova.scheduler.host_columns import Bools
from micronova.scheduler.host_view import HostView


class Scope(enum.Enum):
    """The hosts whose result or weight may change when an instance of the request is placed on a host."""

    REQUEST = "request"  # of no host: asked once per request
    HOST = "host"  # of that host: asked again for it alone
    ALL = "all"  # of any host: asked again for all


class FilterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of filters."""

    service_down_time: float  # seconds after its last heartbeat from which a host is down
    settings: FilterSchedulerSettings = FilterSchedulerSettings()
    metrics: MetricsSettings = MetricsSettings()
    pci_aliases: dict[str, Alias] = {}


class Compared(NamedTuple):
    """The answer of a filter that may leave hosts out."""

    mask: Bools | None
    uncompared: Bools | None = None  # hosts that it has not compared

    @classmethod
    def of(cls, answer: "Bools | Compared | None") -> "Compared":
        """Return what a filter has answered."""
        return answer if isinstance(answer, cls) else cls(cast("Bools | None", answer))


class HostFilter(ABC):
    """Decides which hosts can take an instance of a request."""

    name: ClassVar[str] = ""
    scope: ClassVar[Scope] = Scope.ALL
    covers: ClassVar[frozenset[str]] = frozenset()  # resource classes whose free amounts this filter checks
    hints: ClassVar[frozenset[str]] = frozenset()  # scheduler hints of Nova that this filter honours
    compares_images: ClassVar[bool] = False  # it compares images with hosts: it also decides about rebuilds
    always: ClassVar[bool] = False  # it is asked whether it is enabled or not, also about a host that is forced
    extra_specs: ClassVar[frozenset[str]] = frozenset()  # namespaces of extra specs that it honours, e.g. `trait`
    narrows: ClassVar[bool] = False  # it leaves the hosts that the request is about: asked before all else
    predicate: ClassVar[str] = "meets all requirements of the request"  # of hosts that pass; users read "no host …"
    lack: ClassVar[str] = "do not meet the request"  # of hosts that it removes; users read "3 hosts …"

    asks_remaining: ClassVar[bool] = False  # it is asked about the hosts that are left only, because it takes long

    def __init__(self, options: FilterOptions) -> None:
        self.options = options

    def check(self, hints: Mapping[str, Sequence[str]], extra_specs: Mapping[str, str]) -> None:
        """Raise Invalid if a request has malformed hints or extra specs that this filter honours."""
        return

    def reads_extra_spec(self, name: str) -> bool:
        """Return whether an extra spec may matter to this filter; users are told of those that matter to none."""
        namespace, colon, _ = name.partition(":")
        return bool(colon) and namespace in self.extra_specs

    def reads_property(self, name: str) -> bool:
        """Return whether a property of an image may matter to this filter."""
        return False

    def describe(self, spec: RequestSpec) -> str:
        """Return what a host that passes is or has, without names of others' things: users read "no host …"."""
        return self.predicate

    def concerns(self, spec: RequestSpec) -> bool:
        """Return False if a filter that asks the remaining hosts has nothing to prepare for a request."""
        return True

    async def prepare(self, hosts: HostView, spec: RequestSpec) -> None:
        """Do work of `mask` before the decision, with pauses: a filter whose mask may take long remembers results."""
        return

    @abstractmethod
    def mask(self, hosts: HostView, spec: RequestSpec) -> "Bools | Compared | None":
        """Return True for each host that passes, or None if the request does not concern this filter.

        A filter that does not compare all hosts, because that takes long, says so by `Compared`.
        """


class EachHost(HostFilter):
    """A filter that gets one host at a time, as an object: simple to write, but slow with many hosts."""

    @abstractmethod
    def passes(self, host: HostState, spec: RequestSpec) -> bool:
        """Return whether this host can take an instance of the request."""

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        return np.fromiter((self.passes(hosts.state(p), spec) for p in range(len(hosts))), np.bool_, len(hosts))


def filter_of(name: str, function: Callable[[HostState, RequestSpec], bool], options: FilterOptions) -> HostFilter:
    """Return a filter that asks a plain function about each host.

    The function may have attributes: `hints` and `extra_specs`, with what a filter's class has there.
    """

    class OfFunction(EachHost):
        hints = frozenset(getattr(function, "hints", ()))
        extra_specs = frozenset(getattr(function, "extra_specs", ()))

        def passes(self, host: HostState, spec: RequestSpec) -> bool:
            return bool(function(host, spec))

    OfFunction.name = name
    return OfFunction(options)
