"""The name under which a conductor or a scheduler has its row among services: no other one on this machine has it.

The kernel knows which names are taken: a process holds an abstract socket for each of its rows until it ends, however
it ends. So one that was killed finds its name free when it is started again.
"""

import contextlib
import errno
import hashlib
import logging
import socket
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Final

from micronova.conf.settings import Settings

log = logging.getLogger(__name__)

ONE_OF_A_NAME: Final = frozenset({"conductor", "scheduler"})
"""Roles that have a row of their own among services. Workers of an API share a name."""


@contextlib.contextmanager
def own_name(settings: Settings, roles: Iterable[str], worker: int = 0) -> Iterator[str]:
    """Yield default.host, or HOST-2, HOST-3… if another process of the region on this machine has its row.

    The second worker begins with HOST-2, and so on. So each has the same name after every start.
    """
    host = settings.default.host or socket.gethostname()
    rows = sorted(ONE_OF_A_NAME.intersection(roles))
    if not rows or not settings.database.connection:
        yield _named(host, 1 + worker) if rows else host
        return
    for number in count(1 + worker):
        name = _named(host, number)
        with contextlib.ExitStack() as held:
            try:
                for row in rows:
                    held.enter_context(_held(settings.database.connection, row, name))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                log.warning("whether another process has the name %s cannot be found out: %s", name, error.strerror)
            if number > 1 + worker:
                log.warning(
                    "this process is called %s, because another %s on this machine is called %s: set default.host "
                    "(MICRONOVA__DEFAULT__HOST) to a name of its own in each, which it then has after every start",
                    name,
                    " or ".join(rows),
                    host,
                )
            yield name
            return


def _named(host: str, number: int) -> str:
    return host if number == 1 else f"{host}-{number}"


def _held(connection: str, row: str, name: str) -> socket.socket:
    """Return a socket whose address stands for a row in a database; raise OSError if another process has it."""
    from sqlalchemy.engine import make_url

    url = make_url(connection)
    region = f"{url.host or url.query.get('host')}:{url.port}/{url.database}"  # logins differ while one is changed
    address = hashlib.sha256(f"{region} {row} {name}".encode()).hexdigest()
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        made.bind(f"\0micronova-{address}")
    except BaseException:
        made.close()
        raise
    return made
