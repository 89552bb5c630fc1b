"""The differences to Nova that have a reason."""

from collections import Counter
from typing import Any

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
    """Return why devices made the difference, by trying all choices of them: our own choice counts for nothing here."""
    requests = case["request"]["devices"]
    if not requests:
        return None
    if ours is False:
        # Nova's cells have enough devices only if one instance may have what excludes each other.
        if nova is False or _can_choose(case, _cells_of(nova)):
            return None
        return BOTH_FUNCTIONS if _can_choose(case, _cells_of(nova), both_functions=True) else None
    if nova is not False and _cells_of(ours) == _cells_of(nova):
        return None
    if not _can_choose(case, _cells_of(ours)):
        return None
    if len(requests) == 1:
        counted = any(_matches(device, requests[0]) and device["dev_type"] == "type-PF" for device in case["devices"])
        return FUNCTIONS_FIRST if counted and not _wants_functions(requests[0]) else None
    shared = any(sum(_suits(device, each) for each in requests) > 1 for device in case["devices"])
    return ORDER_OF_REQUESTS if shared else None


def _cells_of(fitted: Any) -> list[int]:
    return [cell[0] for cell in fitted]


def _can_choose(case: Case, cells: list[int], *, both_functions: bool = False) -> bool:
    """Return whether there are devices for all requests of an instance in these host cells, tried one by one."""
    slots = [each for each in case["request"]["devices"] for _ in range(each["count"])]

    def extend(chosen: list[Case]) -> bool:
        if len(chosen) == len(slots):
            return True
        return any(
            extend([*chosen, device])
            for device in case["devices"]
            if device not in chosen
            and _suits(device, slots[len(chosen)])
            and _is_near(case, device, slots[len(chosen)]["policy"], cells)
            and (both_functions or not any(_exclude(device, other) for other in chosen))
        )

    return extend([])


def _exclude(one: Case, other: Case) -> bool:
    return bool(one["parent"] == other["address"] or other["parent"] == one["address"])


def _matches(device: Case, request: Case) -> bool:
    return any(all(device[name] == value for name, value in spec.items()) for spec in request["specs"])


def _wants_functions(request: Case) -> bool:
    return any(spec.get("dev_type") == "type-PF" for spec in request["specs"])


def _suits(device: Case, request: Case) -> bool:
    return _matches(device, request) and (device["dev_type"] != "type-PF" or _wants_functions(request))


def _is_near(case: Case, device: Case, policy: str, cells: list[int]) -> bool:
    node = device["numa_node"]
    if not cells or policy == "preferred" or node in cells:
        return True
    if policy == "socket" and node is not None and all(cell["socket"] is not None for cell in case["cells"]):
        sockets = {cell["id"]: cell["socket"] for cell in case["cells"]}
        return sockets[node] in [sockets[cell] for cell in cells]
    return policy == "legacy" and node is None


def request_reason(case: Case, ours: Any, nova: Any) -> str | None:
    """Return why we may read flavor and image otherwise than Nova, None if we may not."""
    if ours is False and case["properties"].get("hw_numa_nodes") == "0":
        return "Nova ignores an image's hw_numa_nodes of 0 if the flavor has a number, we refuse it"
    return None
