"""EC2's metadata as a tree of directories and text files."""

from collections.abc import Mapping, Sequence
from typing import Any

from micronova.metadata import ec2, openstack
from micronova.metadata.facts import Facts


def look_up(facts: Facts, version: str, path: Sequence[str]) -> bytes | None:
    """Return the content of a file or the names in a directory, None if there is neither."""
    if version not in (*ec2.VERSIONS, ec2.LATEST):
        return None
    node: Any = {"meta-data": ec2.meta_data(facts, version)}
    user_data = openstack.decoded(facts.instance.user_data)
    if user_data is not None:
        node["user-data"] = user_data
    for name in path:
        if not isinstance(node, Mapping) or name not in node:
            return None
        node = node[name]
    if list(path) == ["meta-data", "public-keys"]:
        return f"0={facts.instance.key_name}".encode()  # EC2 lists this directory with the names of the keys
    return _text(node)


def _text(node: Any) -> bytes:
    if isinstance(node, bytes):
        return node
    if isinstance(node, Mapping):
        return "\n".join(f"{name}/" if isinstance(node[name], Mapping) else name for name in sorted(node)).encode()
    return "\n".join(node).encode() if isinstance(node, list) else str(node).encode()
