"""The dnsmasq processes, which are DHCP servers and advertisers: the kernel tells when one ends."""

import asyncio
import logging
import os
from collections.abc import Callable

log = logging.getLogger(__name__)

CRASH_DELAY = 1.0  # seconds before a dnsmasq that has ended twice in a short time is started again
CRASH_TIME = 10.0  # seconds between two ends that count as a short time


class DnsmasqWatch:
    """Calls back when a dnsmasq ends."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._watched: dict[str, tuple[int, int]] = {}  # namespace -> process id and its pidfd
        self._ended: dict[str, float] = {}  # namespace -> when its last dnsmasq ended

    def watch(self, namespace: str, pid: int) -> None:
        """Watch the dnsmasq of a namespace, instead of the one that was watched before."""
        if self._watched.get(namespace, (0, 0))[0] == pid:
            return
        self.forget(namespace)
        try:
            made = os.pidfd_open(pid)
        except ProcessLookupError:
            self._note(namespace, pid)
            return
        self._watched[namespace] = (pid, made)
        asyncio.get_running_loop().add_reader(made, self._end, namespace)

    def forget(self, namespace: str) -> None:
        """Stop watching the dnsmasq of a namespace, because it is about to be ended."""
        _, made = self._watched.pop(namespace, (0, None))
        if made is not None:
            asyncio.get_running_loop().remove_reader(made)
            os.close(made)

    def close(self) -> None:
        """Stop watching."""
        for namespace in list(self._watched):
            self.forget(namespace)

    def _end(self, namespace: str) -> None:
        pid, _ = self._watched[namespace]
        self.forget(namespace)
        self._note(namespace, pid)

    def _note(self, namespace: str, pid: int) -> None:
        log.warning("the dnsmasq process %d of %s has ended; it is started again", pid, namespace)
        loop = asyncio.get_running_loop()
        before, self._ended[namespace] = self._ended.get(namespace), loop.time()
        if before is not None and loop.time() - before < CRASH_TIME:
            loop.call_later(CRASH_DELAY, self._changed)
        else:
            self._changed()
