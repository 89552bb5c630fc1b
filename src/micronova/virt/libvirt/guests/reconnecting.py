"""Having a guest's requests wait while a volume is not served.

QEMU can do it (`reconnect-delay` of its NBD client), but libvirt has no way to ask for it, so that a guest would get
errors at once. Libvirt gives each volume two nodes of QEMU: one that the disk uses, which is raw or decrypts, and below
it the client. So a client of our own, which waits, is put below the upper node by QEMU's monitor. Libvirt's client
stays, unused, and goes with the disk.
"""

import json
from typing import Any, Final

from micronova.virt.libvirt.client.binding import Domain
from micronova.virt.libvirt.client.library import load_qemu
from micronova.virt.libvirt.definition.types import NBDSource, VolumeSource

WAIT_SECONDS: Final = 86_400
"""For how long requests wait; after that the guest gets errors."""
_STORAGE, _FORMAT = "-storage", "-format"


def wait_for(domain: Domain, volume: VolumeSource, *, readonly: bool, again: bool = False) -> None:
    """Have the requests of a running guest to a volume wait while it is not served; do nothing if they do already.

    With `again` there is a new client in any case, which knows the size that the volume has now. Clients of RBD and
    iSCSI wait by themselves.
    """
    if not isinstance(volume, NBDSource):
        return
    nodes = {node["node-name"]: node for node in _ask(domain, "query-named-block-nodes", flat=True)}
    old = [name for name in _names(volume.export) if name in nodes]
    if old and not again:
        return
    ours = next(name for name in _names(volume.export) if name not in nodes)
    clients = [name for name, node in nodes.items() if node["drv"] == "nbd" and _exports(node) == volume.export]
    formats = [name.removesuffix(_STORAGE) + _FORMAT for name in clients if name.endswith(_STORAGE)]
    [above] = [name for name in formats if name in nodes]
    cache = nodes[above]["cache"]
    server = (
        {"type": "unix", "path": volume.socket}
        if volume.socket
        else {"type": "inet", "host": volume.host, "port": str(volume.port)}
    )
    common = {"read-only": readonly, "discard": "unmap"}
    options = {"cache": {"direct": cache["direct"], "no-flush": cache["no-flush"]}, **common}
    client = {"driver": "nbd", "server": server, "export": volume.export, "reconnect-delay": WAIT_SECONDS, **options}
    _ask(domain, "blockdev-add", **{"node-name": ours, **client})
    try:
        _ask(domain, "blockdev-reopen", options=[{**_format(domain, nodes[above]), "file": ours, **options}])
    except BaseException:
        _ask(domain, "blockdev-del", **{"node-name": ours})
        raise
    for name in old:
        _ask(domain, "blockdev-del", **{"node-name": name})


def _format(domain: Domain, node: dict[str, Any]) -> dict[str, Any]:
    """Return what makes a node that has a client below it: a raw one, or one that decrypts with libvirt's key."""
    name = node["node-name"]
    if node["drv"] != "luks":
        return {"driver": "raw", "node-name": name}
    objects = [each["name"] for each in _ask(domain, "qom-list", path="/objects")]
    [key] = [each for each in objects if each.startswith(f"{name}-") and "secret" in each]
    return {"driver": "luks", "node-name": name, "key-secret": key}


def forget(domain: Domain, export: str) -> None:
    """Remove the client of a volume that the guest does not have any more."""
    names = _names(export)
    for node in _ask(domain, "query-named-block-nodes", flat=True):
        if node["node-name"] in names:
            _ask(domain, "blockdev-del", **{"node-name": node["node-name"]})


def _names(export: str) -> tuple[str, str]:
    """Return the names of our clients of a volume: two, because a new one is there before the old one goes."""
    name = f"mn{export.replace('-', '')}"[:30]  # QEMU allows 31 characters
    return f"{name}0", f"{name}1"


def _exports(node: dict[str, Any]) -> str:
    """Return the export that a client is connected to: its name is the path of the address."""
    name: str = node["file"]
    return name.partition("?")[0].rpartition("/")[2]


def _ask(domain: Domain, command: str, **arguments: Any) -> Any:
    given = json.dumps({"execute": command, "arguments": arguments})
    answer = json.loads(load_qemu().qemuMonitorCommand(domain, given, 0))
    if "error" in answer:
        raise RuntimeError(f"QEMU refused {command}: {answer['error'].get('desc')}")
    return answer["return"]
