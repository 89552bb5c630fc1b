"""Policies: names, settings on the command line, and files of settings."""

from pathlib import Path

import pytest

from micronova.fleetsim.policies import PolicyScheduler, parse_policy
from micronova.objects.errors import Invalid


def test_settings_on_the_command_line() -> None:
    policy = parse_policy(
        "mine=ram_weight_multiplier=-1,default.cpu_allocation_ratio=2,enabled_filters=ComputeFilter+NumInstancesFilter,"
        "max_instances_per_host=3,build_failure_weight_multiplier=1e+3"
    )
    settings = policy.settings
    assert policy.name == "mine"
    assert settings.filter_scheduler.ram_weight_multiplier == -1.0
    assert settings.default.cpu_allocation_ratio == 2.0
    assert settings.filter_scheduler.build_failure_weight_multiplier == 1000.0
    assert settings.filter_scheduler.enabled_filters == ("ComputeFilter", "NumInstancesFilter")
    names = [each.name for each in PolicyScheduler(policy, 1).scheduler.filters]
    assert names == [
        "RetryFilter",
        "AvailabilityZoneFilter",
        "ComputeFilter",
        "NumInstancesFilter",
        "ServerGroupAntiAffinityFilter",
        "ServerGroupAffinityFilter",
        "NUMATopologyFilter",
        "PciPassthroughFilter",
    ]


def test_policies_that_are_known_by_name() -> None:
    assert parse_policy("spread").changed == {}
    pack = parse_policy("pack").settings.filter_scheduler
    assert (pack.ram_weight_multiplier, pack.cpu_weight_multiplier, pack.disk_weight_multiplier) == (-1, -1, -1)


def test_the_settings_file_of_a_cloud(tmp_path: Path) -> None:
    file = tmp_path / "cloud.toml"
    file.write_text("[default]\nram_allocation_ratio = 1.2\n[filter_scheduler]\nhost_subset_size = 4\n")
    policy = parse_policy(f"cloud={file}")
    assert policy.settings.filter_scheduler.host_subset_size == 4
    assert policy.changed == {"ram_allocation_ratio": "1.2", "host_subset_size": "4"}


def test_the_environment_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICRONOVA__FILTER_SCHEDULER__RAM_WEIGHT_MULTIPLIER", "-5")
    assert parse_policy("spread").settings.filter_scheduler.ram_weight_multiplier == 1.0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dense", "There is no policy dense: write spread or pack, or give it settings"),
        ("=ram_weight_multiplier=1", "has no name"),
        ("a=", "is no setting: write OPTION=VALUE"),
        ("a=ram_weight_multiplier", "is no setting: write OPTION=VALUE"),
        ("a=ram_multiplier=1", "cannot have the setting ram_multiplier: it may have"),
        ("a=scheduler.ram_weight_multiplier=1", "cannot have the setting scheduler.ram_weight_multiplier"),
        ("a=ram_weight_multiplier=much", "filter_scheduler.ram_weight_multiplier is"),
        ("a=cpu_allocation_ratio=-1", "default.cpu_allocation_ratio is"),
        ("a=image_props_weight_multiplier=1", "cannot have the setting image_props_weight_multiplier"),
        ("a=/nowhere/cloud.toml", "Cannot read /nowhere/cloud.toml"),
    ],
)
def test_what_is_wrong_is_refused(text: str, said: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_policy(text)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[filter_scheduler]\nimage_props_weight_multiplier = 2",
            "image_props_weight_multiplier, which is not simulated",
        ),
        ("[metrics]\nweight_setting = ['cpu.percent=1']", "simulated hosts measure nothing"),
    ],
)
def test_settings_that_cannot_be_simulated_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "cloud.toml"
    file.write_text(text)
    with pytest.raises(Invalid, match=said):
        parse_policy(f"cloud={file}")


def test_an_unknown_filter_is_refused() -> None:
    with pytest.raises(Invalid, match="Unknown scheduler filter RamFiltre"):
        PolicyScheduler(parse_policy("a=enabled_filters=RamFiltre"), 1)
