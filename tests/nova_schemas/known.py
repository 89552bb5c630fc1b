"""Differences from Nova's schemas that are meant, with their reasons; docs/nova-schemas.md lists them."""

import re

from tests.nova_schemas.probes import Probe

LATER = "Nova's schema accepts it, and Nova refuses it with 400 afterwards"
NOTHING = "Nova accepts a filter or a flag that means nothing and finds nothing, or ignores it; here it is refused"
LIMIT = "numbers and texts have limits here, which no useful value exceeds"
EMPTY = "Nova ignores what has no meaning; here it is refused"

# A pattern for the route, what is tried and the message; the reason.
REASONS: tuple[tuple[str, str], ...] = (
    (r"GET /flavors\S* query is_public .*neither true nor false", LATER),
    (r"POST /flavors body flavor.rxtx_factor .*more than 0", LATER),
    (r"GET /os-simple-tenant-usage\S* query (start|end) .*not an ISO 8601 time", LATER),
    (r"GET /servers\S* query (sort_dir|all_tenants|locked) ", LATER),
    (
        r"GET /servers\S* query (block_device_mapping|info_cache|metadata|pci_devices|security_groups|services|"
        r"system_metadata) ",
        LATER,
    ),
    (r"POST \S+( action rebuild)?.* body \S+\.(personality|user_data) ", LATER),
    (r"POST /servers body server.networks .*uuid", LATER),
    (r"POST /servers body server.block_device_mapping_v2 .*source_type", LATER),
    (r"POST /servers/{id}/remote-consoles body .*is a console of the protocol", LATER),
    (r"POST /servers/{id}/action unshelve body unshelve.(availability_zone|host) ", LATER),
    (
        r"GET /servers\S* query (launch_index|power_state|progress|launched_at|terminated_at|created_at|config_drive|"
        r"auto_disk_config|soft_deleted|deleted) ",
        NOTHING,
    ),
    (r"GET /os-migrations query hidden .*neither true nor false", NOTHING),
    (r"GET /servers\S* query \S+ .*a pattern has at most 255 characters", LIMIT),
    (r"query user_id .*at most 64 characters", LIMIT),
    (r"body keypair.user_id .*at most 64 characters", LIMIT),
    (r"body \S+ .*is not from \d+ to 2147483647", LIMIT),
    (r"POST /servers body server.(min|max)_count .*from 1 to 100000", LIMIT),
    (r"body (add|remove)SecurityGroup.name .*at most 255 characters", LIMIT),
    (r"POST /os-floating-ips body .*Additional properties are not allowed", EMPTY),
    (r"POST /servers body server.security_groups .*'name' is a required property", EMPTY),
    (r"POST /servers body \S+:scheduler_hints.(group|same_host|different_host) ", EMPTY),
)


def reason_for(label: str, probe: Probe, status: int, message: str) -> str:
    """Return why a difference is meant; an empty text if it is not."""
    if status != 400:
        return ""  # Nova refuses it, or the answer is not what our OpenAPI document says
    text = f"{label} {probe.kind} {probe.place} {message}"
    return next((reason for pattern, reason in REASONS if re.search(pattern, text)), "")
