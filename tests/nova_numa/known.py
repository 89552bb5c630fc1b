"""The differences to Nova that have a reason."""

from collections import Counter
from typing import Any

from micronova.objects.device_fitting import choose_devices, free_devices
from tests.nova_numa.cases import Case

CACHES = (
    "Nova remembers which cells fit by ids that it changes while it tries them, so it may place a cell on CPUs of "
    "another one, or find no place"
)
SET_ORDER = "Nova takes the threads of a core in the order of a Python set, we take the lowest first"
ORDER_OF_REQUESTS = "Nova gives devices to the first request that only a later one could have had, so it finds no place"
FUNCTIONS_FIRST = (
    "Nova counts physical functions as near devices, and leaves them out afterwards, so it finds too few near ones and "
    "does not look at others"
)
BOTH_FUNCTIONS = "Nova gives one instance a virtual function and its physical function, which exclude each other"


def fit_reason(case: Case, ours: Any, nova: Any, without_caches: Any) -> str | None:
    """Return why our fitting may differ from Nova's in this case, None if it may not."""
    if _same_cores(case, ours, nova):
        return SET_ORDER
    if nova != without_caches and (ours == without_caches or _same_cores(case, ours, without_caches)):
        return CACHES
    return _device_reason(case, ours, without_caches)


def _same_cores(case: Case, ours: Any, nova: Any) -> bool:
    """Return whether both take the same cells and pages, and as many threads of the same cores."""
    if not (ours and nova) or len(ours) != len(nova):
        return False
    core_of = {
        cpu: (cell["id"], core) for cell in case["cells"] for core, each in enumerate(cell["siblings"]) for cpu in each
    }

    def cores(fitted: Any) -> list[Any]:
        return [
            [cell, page, Counter(core_of[cpu] for _, cpu in pins), len(pins), len(emulator)]
            for cell, page, pins, emulator in fitted
        ]

    free = {cpu for cell in case["cells"] for cpu in cell["dedicated"] if cpu not in cell["pinned"]}
    used = [cpu for _, _, pins, emulator in nova for cpu in (*(cpu for _, cpu in pins), *emulator)]
    return cores(ours) == cores(nova) and set(used) <= free and len(set(used)) == len(used)


def _device_reason(case: Case, ours: Any, nova: Any) -> str | None:
    requests = case["asked"].devices
    if not requests:
        return None
    if ours is False:
        kinds = {device.dev_type for device in free_devices(case["topology"], case["use"])}
        return BOTH_FUNCTIONS if len(requests) > 1 and {"type-PF", "type-VF"} <= kinds else None
    if nova is not False and [cell[0] for cell in ours] == [cell[0] for cell in nova]:
        return None
    # We found devices that satisfy each request.
    cells = frozenset(cell[0] for cell in ours) if ours else None
    if choose_devices(case["topology"], case["use"], requests, cells) is None:
        return None
    return FUNCTIONS_FIRST if len(requests) == 1 else ORDER_OF_REQUESTS


def request_reason(case: Case, ours: Any, nova: Any) -> str | None:
    """Return why we may read flavor and image otherwise than Nova, None if we may not."""
    if ours is False and case["properties"].get("hw_numa_nodes") == "0":
        return "Nova ignores an image's hw_numa_nodes of 0 if the flavor has a number, we refuse it"
    return None
