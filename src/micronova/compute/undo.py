"""Removing guests, with patience."""

import logging

from micronova.compute.host import Host

log = logging.getLogger(__name__)

ATTEMPTS = 3
FIRST_PAUSE = 1.0


async def destroy(host: Host, uuid: str) -> None:
    """Remove a guest; a driver that fails gets another chance before its error is passed on."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            await host.driver.destroy(uuid)
        except Exception as error:
            log.warning("host %s: instance %s cannot be removed (attempt %d): %s", host.name, uuid, attempt, error)
            if attempt == ATTEMPTS:
                raise
            await host.clock.sleep(FIRST_PAUSE * 2 ** (attempt - 1))
        else:
            host.gone(uuid)
            return
