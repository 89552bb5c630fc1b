"""The stories into which single faults are injected: what users do, and which actions they ask for.

Together they ask for every server action; a test compares them with the routes of the API.
"""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.simulation import scenarios, volume_scenarios
from tests.simulation.simulated_cloud import SimulatedCloud

Scenario = Callable[[SimulatedCloud], Awaitable[None]]


class Story(NamedTuple):
    """A scenario, the actions that it asks for when nothing goes wrong, and the cloud that it needs."""

    scenario: Scenario
    actions: frozenset[str]
    services: tuple[str, ...] = ()  # embedded ones
    default: Mapping[str, Any] = MappingProxyType({})  # settings of the section `default`

    @property
    def name(self) -> str:
        return self.scenario.__name__


def _story(scenario: Scenario, actions: str, services: str = "", volumes: str = "", **default: Any) -> Story:
    """Return a story; `volumes` names the requests about volumes without this word."""
    of_volumes = {f"{each} volume" for each in volumes.split()}
    return Story(scenario, frozenset({*actions.split(), *of_volumes}), tuple(services.split()), default)


OTHER_REQUESTS = frozenset(
    {"create", "delete", "attach", "detach", "attach volume", "detach volume", "swap volume", "extend volume"}
)
"""What the stories ask for that is not a server action of the API, under the names of `action_of`."""
LIFECYCLE = _story(scenarios.server_lifecycle, "create os-stop os-start reboot delete")
"""The one with the whole life of a server; the others begin with a server that is active."""
STORIES = (
    _story(scenarios.pause_and_suspend, "create pause unpause suspend resume"),
    _story(scenarios.rescue_and_passwords, "create rescue trigger_crash_dump unrescue changePassword"),
    _story(
        scenarios.look_and_administer,
        "create os-getConsoleOutput os-getVNCConsole os-getSerialConsole os-getSPICEConsole lock unlock reboot"
        " os-resetState",
    ),
    _story(scenarios.attach_and_detach, "create attach detach delete", "network"),
    _story(
        scenarios.change_addresses,
        "create addSecurityGroup removeSecurityGroup addFixedIp removeFixedIp addFloatingIp removeFloatingIp"
        " injectNetworkInfo",
        "network",
    ),
    _story(scenarios.make_images, "create createImage createBackup delete", "image"),
    _story(scenarios.rebuild, "create rebuild os-stop os-start"),
    _story(scenarios.soft_delete, "create delete restore forceDelete", reclaim_instance_interval=3600.0),
    _story(scenarios.reclaim, "create delete", reclaim_instance_interval=5.0),
    _story(scenarios.resize_and_back, "create resize revertResize confirmResize delete"),
    _story(scenarios.resize_pinned, "create resize revertResize confirmResize delete"),
    _story(scenarios.migrate_and_back, "create migrate revertResize confirmResize"),
    _story(scenarios.live_migrate, "create os-migrateLive delete"),
    _story(scenarios.evacuate, "create evacuate os-start"),
    _story(scenarios.end_moves, "create os-migrateLive migrate resize os-resetState"),
    _story(scenarios.shelve_and_back, "create shelve unshelve delete", "image"),
    _story(
        scenarios.shelve_and_offload, "create shelve unshelve shelveOffload delete", "image", shelved_offload_time=-1
    ),
    _story(volume_scenarios.attach_and_detach_volumes, "create delete", "volume", "attach detach"),
    _story(volume_scenarios.swap_and_extend_volumes, "create", "volume", "attach swap extend"),
    _story(volume_scenarios.boot_from_volumes, "create delete", "image volume"),
    _story(volume_scenarios.image_volume_backed, "create createImage", "image volume"),
    _story(volume_scenarios.shelve_volume_backed, "create shelve unshelve delete", "image volume"),
    _story(volume_scenarios.rebuild_volume_backed, "create rebuild", "image volume"),
    _story(volume_scenarios.rescue_volume_backed, "create rescue unrescue", "image volume"),
    _story(
        volume_scenarios.move_with_volumes,
        "create resize revertResize migrate confirmResize os-migrateLive",
        "volume",
        "attach",
    ),
    _story(volume_scenarios.share_a_volume, "create delete", "volume", "attach detach"),
    _story(volume_scenarios.attach_at_rest, "create os-stop os-start", "volume", "attach detach extend"),
    _story(volume_scenarios.attach_while_shelved, "create shelve unshelve", "image volume", "attach detach"),
    _story(volume_scenarios.delete_during_work, "create delete", "image volume", "attach detach"),
    _story(
        volume_scenarios.soft_delete_with_volumes,
        "create delete restore forceDelete",
        "image volume",
        "attach",
        reclaim_instance_interval=3600.0,
    ),
    _story(volume_scenarios.use_volumes_by_hand, "", "volume"),
    _story(volume_scenarios.copy_volumes, "", "image volume"),
    _story(volume_scenarios.upload_a_volume, "", "image volume"),
    _story(volume_scenarios.change_volumes, "", "image volume", "extend"),
    _story(volume_scenarios.evacuate_with_volumes, "create evacuate os-start", "image volume"),
)
