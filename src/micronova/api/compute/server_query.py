"""The query string of server lists: the filters, who may use them, and what they mean."""

import re
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from micronova.api import inputs
from micronova.api.compute.server_inputs import id_in
from micronova.db.server_lists import SORT_KEYS, Filters
from micronova.http.paging import check_filter
from micronova.http.request import Request
from micronova.http.versions import since
from micronova.objects import power_state, states
from micronova.objects.errors import Forbidden, Invalid

OptionalText = str | UnsetType

# Filters for everybody, and further ones since 2.83; all others are for administrators.
_OPEN = {
    "reservation_id",
    "name",
    "status",
    "image",
    "flavor",
    "ip",
    "changes-since",
    "all_tenants",
    "ip6",
    "tags",
    "tags-any",
    "not-tags",
    "not-tags-any",
    "changes-before",
    "locked",
}
_OPEN_83 = {
    "availability_zone",
    "config_drive",
    "key_name",
    "created_at",
    "launched_at",
    "terminated_at",
    "power_state",
    "task_state",
    "vm_state",
    "progress",
    "user_id",
}


class ListQuery(
    msgspec.Struct,
    kw_only=True,
    rename={
        "changes_since": "changes-since",
        "changes_before": "changes-before",
        "tags_any": "tags-any",
        "not_tags": "not-tags",
        "not_tags_any": "not-tags-any",
    },
):
    """All query parameters of a list of servers."""

    limit: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    marker: OptionalText = UNSET
    sort_key: list[str] | UnsetType = UNSET
    sort_dir: list[str] | UnsetType = UNSET
    all_tenants: OptionalText = UNSET
    all_projects: OptionalText = UNSET
    deleted: OptionalText = UNSET
    soft_deleted: OptionalText = UNSET
    changes_since: OptionalText = UNSET
    changes_before: OptionalText = UNSET
    status: list[str] | UnsetType = UNSET
    name: OptionalText = UNSET
    display_name: OptionalText = UNSET
    ip: OptionalText = UNSET
    ip6: OptionalText = UNSET
    uuid: list[str] | UnsetType = UNSET
    image: OptionalText = UNSET
    image_ref: OptionalText = UNSET
    flavor: OptionalText = UNSET
    instance_type_id: OptionalText = UNSET
    reservation_id: OptionalText = UNSET
    host: OptionalText = UNSET
    node: OptionalText = UNSET
    hostname: OptionalText = UNSET
    tenant_id: OptionalText = UNSET
    project_id: OptionalText = UNSET
    user_id: OptionalText = UNSET
    vm_state: OptionalText = UNSET
    task_state: OptionalText = UNSET
    power_state: OptionalText = UNSET
    progress: OptionalText = UNSET
    key_name: OptionalText = UNSET
    availability_zone: OptionalText = UNSET
    config_drive: OptionalText = UNSET
    created_at: OptionalText = UNSET
    launched_at: OptionalText = UNSET
    terminated_at: OptionalText = UNSET
    access_ip_v4: OptionalText = UNSET
    access_ip_v6: OptionalText = UNSET
    description: OptionalText = UNSET
    display_description: OptionalText = UNSET
    auto_disk_config: OptionalText = UNSET
    launch_index: OptionalText = UNSET
    root_device_name: OptionalText = UNSET
    kernel_id: OptionalText = UNSET
    ramdisk_id: OptionalText = UNSET
    tags: OptionalText = UNSET
    tags_any: OptionalText = UNSET
    not_tags: OptionalText = UNSET
    not_tags_any: OptionalText = UNSET
    locked: OptionalText = UNSET
    locked_by: OptionalText = UNSET

    versions = {
        "tags": since(26),
        "tags-any": since(26),
        "not-tags": since(26),
        "not-tags-any": since(26),
        "changes-before": since(66),
        "locked": since(73),
    }


_EQUAL = {
    "image": "image_ref",
    "image_ref": "image_ref",
    "flavor": "flavor_id",
    "instance_type_id": "flavor_id",
    "host": "host",
    "user_id": "user_id",
    "vm_state": "vm_state",
    "task_state": "task_state",
}
_NUMBERS = {"power_state": "power_state", "progress": "progress", "launch_index": "launch_index"}
_PATTERNS = {
    "availability_zone": "availability_zone",
    "hostname": "hostname",
    "key_name": "key_name",
    "locked_by": "locked_by",
    "node": "node",
    "reservation_id": "reservation_id",
    "root_device_name": "root_device_name",
    "description": "display_description",
    "display_description": "display_description",
    "access_ip_v4": "access_ip_v4",
    "access_ip_v6": "access_ip_v6",
}
_LONGEST_EXPRESSION = 255
# Filters that Nova takes for regular expressions, whatever it does with them.
_EXPRESSIONS = {
    *_PATTERNS, "name", "display_name", "ip", "ip6", "tags", "tags-any", "not-tags", "not-tags-any", "flavor",
    "kernel_id", "ramdisk_id", "config_drive", "auto_disk_config",
}  # fmt: skip
_RESERVATION = re.compile(r"r-[a-z0-9]{8}")
# What a server has in other tables; Nova does not filter by it.
_JOINED = {
    "block_device_mapping",
    "info_cache",
    "metadata",
    "pci_devices",
    "security_groups",
    "services",
    "system_metadata",
}
# Guests boot from their disk, so these are the same for all servers.
_NO_ORDER = {"kernel_id", "ramdisk_id"}
# Columns that Nova has and does not sort by: accepted before 2.75, without an effect.
_IGNORED_SORT_KEYS = set(
    "architecture cell_name cleaned default_ephemeral_device default_swap_device deleted deleted_at disable_terminate "
    "ephemeral_gb ephemeral_key_uuid id key_data launched_on memory_mb os_type reservation_id root_gb "
    "shutdown_terminate user_data vcpus vm_mode".split()
)
_POWER_STATES = {
    "NOSTATE": power_state.NOSTATE,
    "RUNNING": power_state.RUNNING,
    "PAUSED": power_state.PAUSED,
    "SHUTDOWN": power_state.SHUTDOWN,
    "CRASHED": power_state.CRASHED,
    "SUSPENDED": power_state.SUSPENDED,
}


def list_filters(request: Request, max_limit: int) -> Filters | None:
    """Return the requested filters that the caller may use; None if no server can match."""
    query: ListQuery = request.query
    asked = {
        wire: value
        for name, wire in zip(query.__struct_fields__, query.__struct_encode_fields__, strict=True)
        if (value := getattr(query, name)) is not UNSET
    }
    _check_expressions(asked)
    admin = request.allows(rule="os_compute_api:servers:allow_all_filters")
    if not admin:
        allowed = _OPEN | (_OPEN_83 if request.minor >= 83 else set())
        if request.minor < 5:
            allowed = allowed - {"ip6"}
        paging = {"limit", "marker", "sort_key", "sort_dir"}
        asked = {name: value for name, value in asked.items() if name in allowed | paging}
    elif wrong := next((name for name in request.raw_query if name in _JOINED or name.startswith("_")), None):
        raise Invalid(f"Invalid filter field: {wrong[:64]}.")
    if any(asked.get(name) for name in ("kernel_id", "ramdisk_id")):
        return None  # guests boot from their disk
    filters = Filters(limit=max_limit)
    if "limit" in asked:
        filters.limit = min(asked["limit"], max_limit)
    filters.marker = asked.get("marker") or None
    _set_project(request, asked, filters)
    _set_order(request, query, filters, admin)
    if not _set_statuses(request, asked, filters, admin):
        return None
    _set_times(asked, filters)
    _set_tags(asked, filters)
    _set_values(asked, filters)
    return filters


def _check_expressions(asked: dict[str, Any]) -> None:
    for name in _EXPRESSIONS & asked.keys():
        text = asked[name]
        if len(text) > _LONGEST_EXPRESSION:
            continue  # the filters that use it say so
        try:
            re.compile(text)
        except (re.error, RecursionError, OverflowError):
            text = ""
        if not text:
            raise Invalid(f"Invalid input for query parameter {name}: it must be a regular expression, and not empty.")


def _set_project(request: Request, asked: dict[str, Any], filters: Filters) -> None:
    everywhere = asked.get("all_tenants", asked.get("all_projects"))
    wanted = asked.get("project_id") or asked.get("tenant_id")
    # An empty all_tenants means true.
    if everywhere is not None and (everywhere == "" or inputs.boolean(everywhere, "all_tenants")):
        operation = "detail" if request.route.path.endswith("detail") else "index"
        request.authorize(rule=f"os_compute_api:servers:{operation}:get_all_tenants")
        filters.project_id = wanted or None
    else:
        filters.project_id = request.context.project_id


def _set_order(request: Request, query: ListQuery, filters: Filters, admin: bool) -> None:
    keys = [] if isinstance(query.sort_key, UnsetType) else query.sort_key
    directions = [] if isinstance(query.sort_dir, UnsetType) else query.sort_dir
    if any(direction not in ("asc", "desc") for direction in directions):
        raise Invalid("Invalid input for query parameter sort_dir: it is asc or desc.")
    ignored = _NO_ORDER if request.minor >= 75 else _NO_ORDER | _IGNORED_SORT_KEYS
    if request.minor < 73:
        ignored = ignored | {"locked"}
    order: dict[str, bool] = {}  # a column that comes again changes nothing
    for number, key in enumerate(keys):
        if key in ignored:
            continue
        if key not in SORT_KEYS:
            known = ", ".join(sorted(SORT_KEYS))
            raise Invalid(f"Invalid input for query parameter sort_key: {key[:64]!r} is not one of {known}.")
        if key in ("host", "node") and not admin:
            raise Forbidden(f"Only administrators can sort servers by {key}.")
        direction = directions[number] if number < len(directions) else directions[-1] if directions else "desc"
        order.setdefault(SORT_KEYS[key], direction == "desc")
    filters.sort = list(order.items())
    if not filters.sort and directions:
        filters.sort.append(("created_at", directions[0] == "desc"))


def _set_statuses(request: Request, asked: dict[str, Any], filters: Filters, admin: bool) -> bool:
    """Set the filters of status and deletion; return whether a server can match."""
    if "deleted" in asked:
        filters.deleted = inputs.boolean(asked["deleted"] or "true", "deleted")
    if "soft_deleted" in asked:
        filters.soft_deleted = inputs.boolean(asked["soft_deleted"] or "true", "soft_deleted")
    wanted = [text.upper() for text in asked.get("status", ())]
    if not wanted:
        return True
    unknown = [text for text in wanted if text not in states.STATUSES]
    if unknown and len(unknown) == len(wanted):
        if request.minor >= 38:
            raise Invalid(
                f"Invalid status value: {unknown[0][:64]}. It is one of {', '.join(sorted(states.STATUSES))}."
            )
        return False
    if "DELETED" in wanted:
        if not admin:
            request.authorize(rule="os_compute_api:servers:allow_all_filters")
        filters.deleted = True
    filters.statuses = wanted
    return True


def _set_times(asked: dict[str, Any], filters: Filters) -> None:
    if "changes-since" in asked:
        filters.changes_since = inputs.moment(asked["changes-since"], "changes-since")
    if "changes-before" in asked:
        filters.changes_before = inputs.last_moment(asked["changes-before"], "changes-before")
        if filters.changes_since is not None and filters.changes_since > filters.changes_before:
            raise Invalid("The value of changes-since must be less than or equal to changes-before.")


def _set_tags(asked: dict[str, Any], filters: Filters) -> None:
    def words(name: str) -> list[str]:
        found = list(dict.fromkeys(part for part in asked.get(name, "").split(",") if part))
        check_filter(name, found)
        return found

    filters.tags_all, filters.tags_any = words("tags"), words("tags-any")
    filters.not_tags_all, filters.not_tags_any = words("not-tags"), words("not-tags-any")


def _set_values(asked: dict[str, Any], filters: Filters) -> None:
    for name, column in _EQUAL.items():
        if name in asked:
            filters.equal[column] = id_in(asked[name]) if name in ("image", "flavor") else asked[name]
    for name, column in _NUMBERS.items():
        if name in asked:
            text = asked[name]
            if name == "power_state" and text.upper() in _POWER_STATES:
                filters.equal[column] = _POWER_STATES[text.upper()]
            elif text.lstrip("-").isdigit() and len(text) < 10:
                filters.equal[column] = int(text)
            else:
                raise Invalid(f"Invalid input for query parameter {name}: {text[:64]!r} is not a number.")
    for name, column in _PATTERNS.items():
        if name in asked:
            filters.patterns[column] = asked[name]
    if _RESERVATION.fullmatch(asked.get("reservation_id", "")):
        # A whole id is looked up by the index.
        filters.equal["reservation_id"] = filters.patterns.pop("reservation_id")
    for name in ("created_at", "launched_at", "terminated_at"):
        if name in asked:
            filters.equal[name] = inputs.moment(asked[name], name)
    filters.name = asked.get("name", asked.get("display_name"))
    filters.ip, filters.ip6 = asked.get("ip"), asked.get("ip6")
    if "uuid" in asked:
        filters.uuids = asked["uuid"]
    if "config_drive" in asked:
        filters.equal["config_drive"] = inputs.boolean(asked["config_drive"] or "false", "config_drive")
    if "locked" in asked:
        filters.locked = inputs.boolean(asked["locked"], "locked")
    if "auto_disk_config" in asked:
        automatic = inputs.boolean(asked["auto_disk_config"] or "false", "auto_disk_config")
        filters.equal["disk_config"] = "AUTO" if automatic else "MANUAL"
