"""The roles by name. Nothing else is imported here: root's process needs little more, and stays small."""

COMPUTE_ROLES = ("api", "conductor", "scheduler", "compute")
NEIGHBOUR_ROLES = ("identity", "image", "network")
ROLES = (*COMPUTE_ROLES, "metadata", "console", *NEIGHBOUR_ROLES, "network-agent")
HTTP_ROLES = ("api", "metadata", "console", *NEIGHBOUR_ROLES)

# Whoever asks another at its start comes after it; guests' interfaces are plugged where the agent can see them.
START_ORDER = (
    "identity", "image", "network", "scheduler", "conductor", "api", "metadata", "console", "network-agent", "compute",
)  # fmt: skip
