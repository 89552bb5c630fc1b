"""The shape of a check: a name, the roles that need what it looks at, and a function that says what is wrong.

A check changes nothing. It has a time-out, and an error within it is a finding: it never ends the others.
"""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from micronova.cli.state import StateDirectory
from micronova.conf.settings import Settings
from micronova.objects.errors import MicronovaError

if TYPE_CHECKING:
    from micronova.cli.wiring import Process
    from micronova.db.engine import Database

Outcome = Literal["ok", "error", "unknown"]

TIMEOUT = 30.0
"""Seconds that a check may take. Opening a database or a connection to the broker may take 15 of them."""
CONTROL_ROLES = ("api", "metadata", "conductor", "scheduler", "console")
HOST_ROLES = ("compute", "network-agent")


class Finding(msgspec.Struct, frozen=True):
    """What a check found: the setting to look at, what is wrong with it, and what would be right."""

    setting: str
    found: str
    right: str = ""
    outcome: Outcome = "error"


class CheckResult(msgspec.Struct, frozen=True):
    """One line of the report."""

    name: str
    roles: tuple[str, ...]
    outcome: Outcome
    setting: str = ""
    found: str = ""
    right: str = ""
    file: str = ""

    def line(self) -> str:
        """Return the result as a person reads it."""
        mark = {"ok": "ok  ", "error": "FAIL", "unknown": "?   "}[self.outcome]
        where = f" ({self.file})" if self.file else ""
        what = ": ".join(part for part in (self.setting, self.found.rstrip(".")) if part)
        right = f". Right: {self.right.rstrip('.')}." if self.right else ""
        return f"{mark}  {self.name}{where}{f': {what}' if what else ''}{right}"


@dataclass
class Subject:
    """One settings file with the roles that run with it, and what they share."""

    settings: Settings
    roles: tuple[str, ...]
    place: StateDirectory
    process: "Process"
    file: Path | None = None
    roles_are_named: bool = False
    _databases: dict[str, "asyncio.Task[Database]"] = field(default_factory=dict)

    @property
    def on_bus(self) -> bool:
        """Whether the roles are separate processes, with a broker between them."""
        return not self.settings.default.transport_url.startswith("local:")

    def has_database(self, service: str = "compute") -> bool:
        """Return whether the database of a service may be opened: SQLite makes a file that is missing."""
        url = self.settings.database.connection
        if not url:
            return self.place.has_database(service)
        suffix = "" if service == "compute" else f".{service}"
        return not url.startswith("sqlite:///") or os.path.lexists(url.removeprefix("sqlite:///") + suffix)

    def among(self, roles: Iterable[str]) -> tuple[str, ...]:
        """Return those of the roles that run with these settings."""
        wanted = set(roles)
        return tuple(role for role in self.roles if role in wanted)

    async def database(self, name: str = "compute") -> "Database":
        """Return an open database. Several checks share it; each gets the error if it cannot be opened."""
        if name not in self._databases:
            self._databases[name] = asyncio.ensure_future(self.process.open_database(name))
        return await asyncio.shield(self._databases[name])

    async def close(self) -> None:
        """Close what the checks have opened."""
        for task in self._databases.values():
            task.cancel()
        await asyncio.gather(*self._databases.values(), return_exceptions=True)
        await self.process.stop()


class NotAsked(Exception):
    """Something could not be asked, and another check says why."""


@dataclass(frozen=True)
class Check:
    """A name, the roles that need what it looks at, and what to ask."""

    name: str
    roles: tuple[str, ...]
    find: Callable[[Subject], Awaitable[list[Finding]]]
    setting: str = ""
    right: str = ""
    timeout: float = TIMEOUT

    async def run(self, subject: Subject) -> list[CheckResult]:
        """Return what the check found; a single result without a finding if all is well."""
        try:
            async with asyncio.timeout(self.timeout):
                findings = await self.find(subject)
        except NotAsked as reason:
            findings = [Finding("", str(reason), "", "unknown")]
        except TimeoutError:
            findings = [Finding(self.setting, f"no answer came within {self.timeout:g} s", self.right)]
        except MicronovaError as error:
            findings = [Finding(self.setting, error.message, self.right)]
        except Exception as error:  # noqa: BLE001 - the other checks go on, whatever it is
            said = str(error).partition("\n")[0]
            findings = [Finding(self.setting, f"this check failed: {type(error).__name__}: {said}", self.right)]
        roles = subject.among(self.roles)
        if not findings:
            return [CheckResult(self.name, roles, "ok")]
        return [CheckResult(self.name, roles, each.outcome, each.setting, each.found, each.right) for each in findings]


def plain(find: Callable[[Subject], Iterable[Finding]]) -> Callable[[Subject], Awaitable[list[Finding]]]:
    """Return a check's function that runs in a thread of its own: a file system that hangs stops no other check."""

    async def run(subject: Subject) -> list[Finding]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[Finding]] = loop.create_future()

        def settle(result: list[Finding] | None, error: Exception | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result or [])

        def work() -> None:
            result, failed = None, None
            try:
                result = list(find(subject))
            except Exception as error:  # noqa: BLE001 - the caller raises it
                failed = error
            loop.call_soon_threadsafe(settle, result, failed)

        threading.Thread(target=work, daemon=True, name="check").start()
        return await done

    return run
