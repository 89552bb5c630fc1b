"""Weighers of other packages are made as the built-in ones are."""

from importlib import metadata
from typing import Any

import numpy.typing as npt
import pytest

from micronova.conf.control import FilterSchedulerSettings
from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.host_view import HostView
from micronova.scheduler.weights.base import HostWeigher, WeigherOptions
from micronova.scheduler.weights.registry import GROUP, load_weighers


class ReadsSettings(HostWeigher):
    """A weigher of a plugin that needs the settings."""

    name = "ReadsSettings"
    subset = 0

    @classmethod
    def of(cls, multiplier: float, options: WeigherOptions) -> HostWeigher:
        made = cls(multiplier)
        made.subset = options.settings.host_subset_size
        return made

    def weigh(self, hosts: HostView, spec: RequestSpec) -> npt.NDArray[Any] | None:
        return None


@pytest.mark.parametrize(("given", "expected"), [({}, 1.0), ({"ReadsSettings": 3.0}, 3.0)])
def test_a_plugin_gets_its_multiplier_and_the_settings(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, float], expected: float
) -> None:
    def entry_points(*, group: str) -> list[metadata.EntryPoint]:
        return [metadata.EntryPoint("ReadsSettings", f"{__name__}:ReadsSettings", GROUP)] if group == GROUP else []

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    options = WeigherOptions(settings=FilterSchedulerSettings(host_subset_size=7))
    made = load_weighers(given, options=options)[-1]
    assert isinstance(made, ReadsSettings)
    assert (made.multiplier, made.subset) == (expected, 7)
