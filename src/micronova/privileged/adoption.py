"""Adoption of taps that a libvirt of the machine creates for this cloud's guests.

Such a libvirt creates taps in the machine's namespace. QEMU keeps a tap open when it is moved, so the helper moves it
into the cloud's namespace, where it is plugged like any other. The name of a tap proves nothing: another cloud or
another network service may use the same name. The helper moves a tap only if libvirt has finished with it, if it is on
no bridge, and if the QEMU process of the named guest has it open and runs from a disk in this cloud's directory.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from micronova.privileged import verbs as v
from micronova.privileged.checks import Refused
from micronova.privileged.devices import link_of, links
from micronova.privileged.kernel import Failed, inside, run

_TAP = re.compile(r"\Atap[0-9a-f]{8}-[0-9a-f]{2}\Z")
_PROCESSES = Path("/proc")


def outside() -> list[str]:
    """Return the taps in the helper's own namespace that have the name of a guest's tap."""
    return sorted(name for name, link in links().items() if _TAP.match(name) and _is_tap(link))


def adopt_tap(verb: v.AdoptTap, namespace: str, guests: Path) -> bool:
    """Move a guest's tap into the cloud's namespace; return False while the guest's QEMU does not have it open."""
    link = links().get(verb.tap)
    # Until QEMU has opened it, libvirt still configures the tap by its name.
    if link is None or not any(_holds(process, verb.tap) for process in _guest(verb.guest, guests)):
        return False
    # Libvirt gives a tap the guest's MAC address with the first byte fe, so that a bridge does not take it over.
    if not _is_tap(link) or link.get("address") != f"fe{verb.mac[2:]}":
        raise Refused(f"{verb.tap} is not the tap of the guest's interface {verb.mac}.")
    if link.get("master"):
        raise Refused(f"{verb.tap} is on the bridge {link['master']} already: another program plugged it.")
    with inside(namespace):
        if link_of(verb.tap) is not None:
            raise Failed(f"There is a {verb.tap} in {namespace} already.")
    run(["ip", "link", "set", "dev", verb.tap, "netns", namespace])
    return True


def _is_tap(link: dict[str, Any]) -> bool:
    """Return whether a device is a tap that disappears when its process closes it."""
    made = link.get("linkinfo", {})
    about = made.get("info_data", {})
    return made.get("info_kind") == "tun" and about.get("type") == "tap" and not about.get("persist")


def _guest(uuid: str, guests: Path) -> Iterator[Path]:
    """Yield the process that runs a guest from this cloud's directory in the helper's own namespace."""
    disks = json.dumps(f"{guests}/instances/{uuid}/", ensure_ascii=False)[:-1].encode()  # as on QEMU's command line
    here = (_PROCESSES / "thread-self/ns/net").stat().st_ino
    for process in _PROCESSES.iterdir():
        if not process.name.isdigit():
            continue
        try:
            command = (process / "cmdline").read_bytes()
            words = command.split(b"\0")
            named = b"-uuid" in words[:-1] and words[words.index(b"-uuid") + 1] == uuid.encode()
            if named and disks in command and (process / "ns/net").stat().st_ino == here:
                yield process
        except OSError:  # it ended meanwhile
            continue


def _holds(process: Path, tap: str) -> bool:
    for number in _names(process / "fdinfo"):
        try:
            about = (process / "fdinfo" / number).read_text()
        except OSError:  # closed meanwhile
            continue
        if f"iff:\t{tap}\n" in about:
            return True
    return False


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
