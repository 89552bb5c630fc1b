"""SIGHUP: read again what can change while a process runs.

These are the levels and the file of the log, the access log, policy files, and the certificates of HTTP, of PostgreSQL
and of the authorities that verify other services. If one of the files cannot be used, nothing changes, but for the file
of the log: it is opened anew in any case, because what rotates logs has moved it away. One line of the log says what
was read again, or why nothing was.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from micronova.conf.settings import Settings, options
from micronova.objects.errors import MicronovaError
from micronova.telemetry.logs import set_levels, use_log_file

if TYPE_CHECKING:
    from micronova.cli.wiring import Process

log = logging.getLogger(__name__)

CHANGEABLE: Final = frozenset({"default.log_level", "default.default_log_levels", "default.log_file", "api.access_log"})
"""Settings whose new values take effect. Of others that name files the files are read again, under their old names."""

POLICY_FILES: Final = {"compute": ("api", "policy_file"), "placement": ("placement", "policy_file")}
"""Section and name of the setting with the policy file of a service, by the service's name."""


class SettingsSource(NamedTuple):
    """Where the settings of a process come from."""

    first: Settings  # as they were read at the start, perhaps by another user
    load: Callable[[], Settings]  # reads them again


class _Change(NamedTuple):
    what: str
    apply: Callable[[], object]


def ends_with_its_terminal() -> bool:
    """Return whether SIGHUP means that the terminal of this process is gone, and not that it should read files."""
    return sys.stdin is not None and sys.stdin.isatty()


class Reloader:
    """Reads again, at SIGHUP, what a process can change while it runs."""

    def __init__(self, process: "Process", source: SettingsSource) -> None:
        self._process = process
        self._load = source.load
        self._first = self._last = source.first

    def begin(self) -> None:
        """React to SIGHUP from now on, unless that means that the terminal is gone."""
        if not ends_with_its_terminal():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.reload)

    def reload(self) -> None:
        """Read everything again; if something cannot be used, log why, and change nothing but the file of the log."""
        try:
            new = self._load()
            changes = self._prepared(new)
        except Exception as error:
            open_log_file(self._last)
            if isinstance(error, MicronovaError):
                log.error("SIGHUP: nothing is reloaded, and what was loaded before stays: %s", error.message)
            else:
                log.error("SIGHUP: nothing is reloaded, and what was loaded before stays", exc_info=error)
            return
        if open_log_file(new):
            changes.insert(1, _Change(f"the log file {new.default.log_file}", lambda: None))
        try:
            for change in changes:
                change.apply()
        except Exception as error:
            log.error("SIGHUP: not everything could be reloaded; restart the process", exc_info=error)
            return
        self._last = new
        again = [name for name in _differing(self._first, new) if name not in CHANGEABLE]
        log.warning(
            "SIGHUP: reloaded %s; %s",
            ", ".join(change.what for change in changes),
            f"a restart is needed for {', '.join(again)}" if again else "no setting has changed that needs a restart",
        )

    def _prepared(self, new: Settings) -> list[_Change]:
        """Read and check everything; return the changes to make, which then succeed. Raise MicronovaError."""
        process, settings = self._process, self._process.settings
        changes = [_Change("log levels", partial(set_levels, new, self._last))]
        if process.access_log is not None:
            changes.append(_Change("the access log", partial(setattr, process.access_log, "on", new.api.access_log)))
        for name, (section, option) in POLICY_FILES.items():
            file = getattr(getattr(settings, section), option)
            if file and name in process.services:
                changes.append(self._policy(name, Path(file)))
        certificate, key = settings.api.tls_certificate, settings.api.tls_key
        if certificate and key:
            from micronova.http.server import check_certificate

            check_certificate(certificate, key)
            changes.append(
                _Change(f"the certificate {certificate}", partial(process.use_certificate, certificate, key))
            )
        if authorities := process.clients.check_authorities():
            changes.append(_Change(f"the authorities {authorities}", process.clients.renew_certificates))
        if databases := process.database_certificates():
            changes.append(_Change("the certificates for PostgreSQL", lambda: [read() for read in databases]))
        return changes

    def _policy(self, name: str, file: Path) -> _Change:
        from micronova.policies.enforcer import Enforcer

        current = self._process.services[name].policy
        assert isinstance(current, Enforcer)
        return _Change(f"the policy file {file}", partial(current.adopt, Enforcer(current.rules.values(), file)))


def open_log_file(settings: Settings) -> bool:
    """Open the log file of the settings, if they name one, as the user that the process runs as; return whether that
    was possible."""
    try:
        return use_log_file(settings) is not None
    except OSError as error:
        log.error(
            "cannot open default.log_file (%s): %s; lines go where they went before. Let the user of this process "
            "create it",
            settings.default.log_file,
            error.strerror,
        )
        return False


def _differing(old: Settings, new: Settings) -> list[str]:
    """Return the settings whose values differ."""
    names = (name.partition(".") for name, *_ in options())
    return [
        f"{section}.{option}"
        for section, _, option in names
        if getattr(getattr(old, section), option) != getattr(getattr(new, section), option)
    ]
