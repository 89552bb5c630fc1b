"""What the enabled filters and the settings of the scheduler honour, for the rules that requests are checked by."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from micronova.conf.settings import Settings


def _reads_nothing(name: str) -> bool:
    return False


class Filter(Protocol):
    """The part of a filter of the scheduler that the rules of requests use."""

    @property
    def name(self) -> str:
        """The name by which operators enable it."""

    @property
    def hints(self) -> frozenset[str]:
        """The scheduler hints that it honours."""

    @property
    def extra_specs(self) -> frozenset[str]:
        """The namespaces of extra specs that it honours."""

    def check(self, hints: Mapping[str, Sequence[str]], extra_specs: Mapping[str, str]) -> None:
        """Raise Invalid for malformed hints and extra specs."""

    def reads_extra_spec(self, name: str) -> bool:
        """Return whether an extra spec may matter to it."""

    def reads_property(self, name: str) -> bool:
        """Return whether a property of an image may matter to it."""


@dataclass(frozen=True)
class Honoured:
    """What the enabled filters honour."""

    hints: frozenset[str] = frozenset()
    extra_specs: frozenset[str] = frozenset()  # namespaces, without a colon
    # They raise Invalid for malformed hints and extra specs.
    checks: tuple[Callable[[Mapping[str, Sequence[str]], Mapping[str, str]], None], ...] = ()
    # Whether a filter looks at an extra spec, and at a property of an image, on whatever hosts.
    reads_extra_spec: Callable[[str], bool] = _reads_nothing
    reads_property: Callable[[str], bool] = _reads_nothing
    enabled: frozenset[str] = frozenset()  # filters, and settings that are on (of the section `scheduler`)

    @classmethod
    def of(cls, filters: Iterable[Filter], settings: Settings) -> "Honoured":
        """Return what these filters, and the settings of the scheduler, take into account."""
        every, scheduler = tuple(filters), settings.scheduler
        on = {name for name in scheduler.__struct_fields__ if getattr(scheduler, name) is True}
        if settings.filter_scheduler.image_props_weight_multiplier:
            on.add("filter_scheduler.image_props_weight_multiplier")
        return cls(
            hints=frozenset().union(*(each.hints for each in every)),
            extra_specs=frozenset().union(*(each.extra_specs for each in every)),
            checks=tuple(each.check for each in every),
            reads_extra_spec=lambda name: any(each.reads_extra_spec(name) for each in every),
            reads_property=lambda name: any(each.reads_property(name) for each in every),
            enabled=frozenset(each.name for each in every) | on,
        )


GetHonoured = Callable[[], Honoured]
"""Returns what is honoured. It is called when a request first depends on it: filters need numpy, which is large."""
