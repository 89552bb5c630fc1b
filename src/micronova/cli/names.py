"""The names of the roles. This module imports nothing, so that root's process stays small."""

COMPUTE_ROLES = ("api", "conductor", "scheduler", "compute")
EMBEDDED_ROLES = ("identity", "image", "network", "volume")
ROLES = (*COMPUTE_ROLES, "metadata", "console", *EMBEDDED_ROLES, "network-agent")
HTTP_ROLES = ("api", "metadata", "console", *EMBEDDED_ROLES)

# A role that calls another at its start comes after it. The network agent must run before guests are plugged.
START_ORDER = (
    "identity", "image", "network", "volume", "scheduler", "conductor", "api", "metadata", "console", "network-agent",
    "compute",
)  # fmt: skip
