"""What every kind of operation is: what it does, and what its failure or cancellation gives back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Final, TypeVar

import msgspec
import sqlalchemy as sa

from micronova.embedded.common.compute_events import Event
from micronova.embedded.volume.backend.exports import Report
from micronova.embedded.volume.backend.files import Files, Interrupted
from micronova.embedded.volume.backend.luks import header_size
from micronova.embedded.volume.core import Core
from micronova.embedded.volume.export_manager import ExportManager
from micronova.embedded.volume.images import Images
from micronova.embedded.volume.model import ERROR, ERROR_DELETING, GIB, Operation
from micronova.embedded.volume.operations import messages
from micronova.embedded.volume.operations.payloads import Payload
from micronova.embedded.volume.store import operation_queries, service_queries
from micronova.embedded.volume.store.resource_queries import Rows

IMAGE: Final = "image"  # marks the file of an image that is not converted yet

R = TypeVar("R")

Apply = Callable[[sa.Connection, int], Sequence[Event] | None]
"""Records the result of an operation, in the transaction that removes its row; the number is the time.

It returns the events that compute has to be told."""


class Failed(Exception):
    """An operation cannot succeed; the message is for the user."""

    def __init__(self, detail: messages.Detail, log_text: str = "") -> None:
        super().__init__(log_text or detail.text)
        self.detail = detail


class Attempt:
    """One attempt at an operation."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.progress = 0  # in percent; written by any thread
        self.cancelled = False  # the operation was cancelled meanwhile

    def reporter(self, size: int) -> Report:
        """Return the function that is told how many bytes of `size` are done; it ends work that was cancelled."""

        def report(done: int) -> None:
            if self.cancelled:
                raise Interrupted
            self.progress = min(100, 100 * done // max(size, 1))

        return report


class OperationKind(ABC):
    """One kind of work."""

    name: ClassVar[str]
    action: ClassVar[messages.Action]  # what the message about a failure says was tried
    resource: ClassVar[messages.Resource]
    directory: ClassVar[str]  # of the files that it writes
    rows: ClassVar[Rows]  # of the resources that it changes
    failure_status: ClassVar[str] = ERROR  # of the resource, after a failure

    def __init__(self, core: Core, files: Files, images: Images | None, export_manager: ExportManager) -> None:
        self.core = core
        self.files = files
        self.images = images
        self.export_manager = export_manager

    @classmethod
    def record(
        cls,
        conn: sa.Connection,
        core: Core,
        *,
        id: str,
        resource_id: str,
        project_id: str,
        request_id: str,
        source_id: str | None = None,
        payload: Payload | None = None,
        deferred_until: int = 0,
    ) -> bool:
        """Write an operation of this kind. Transactions do this before they change other rows; see ARCHITECTURE.md.

        Raise Invalid if the storage service is frozen. Return False if the operation exists already, because the answer
        to the first commit was lost: then the transaction has nothing left to do. The operation begins at
        `deferred_until`, or when `start_deferred` is called.
        """
        service_queries.check_not_frozen(conn, core.host)
        return operation_queries.insert(
            conn,
            cls.name,
            core.host,
            core.now(),
            id=id,
            resource_id=resource_id,
            project_id=project_id,
            request_id=request_id,
            source_id=source_id,
            payload={} if payload is None else msgspec.to_builtins(payload),
            deferred_until=deferred_until,
        )

    @abstractmethod
    async def run(self, attempt: Attempt) -> Apply:
        """Do the work, which an earlier attempt may have done in part, and return what records the result.

        Raise Unavailable if something is missing for the moment, Failed or another error if it cannot succeed.
        """

    async def existing(self, get: Callable[[sa.Connection, str], R | None], id: str) -> R:
        """Return what an operation changes or reads, whose row exists for as long as the operation does."""
        found = await self.core.database.read(get, id)
        assert found is not None
        return found

    async def file_size(self, size: int, key_id: str | None, path: Path) -> int:
        """Return the bytes of a file for a volume of `size` GiB; that of an encrypted one has the header of `path`."""
        return size * GIB if key_id is None else size * GIB + await self.files.run(header_size, path)

    async def undo(self, operation: Operation) -> None:
        """Remove the files that a failed or cancelled attempt has not completed; it may run twice."""
        for what in ("", IMAGE):
            part = self.files.part(self.directory, operation.resource_id, operation.id, what)
            await self.files.remove(self.directory, part.name)

    def fail(self, conn: sa.Connection, operation: Operation, now: int) -> None:
        """Record that the operation has failed. A resource that was not made uses its quota until it is deleted."""
        self.rows.set_status(conn, operation.resource_id, self.failure_status, now)
        self.give_back(conn, operation, now)

    def give_back(self, conn: sa.Connection, operation: Operation, now: int) -> None:  # noqa: B027 (most hold nothing)
        """Give back what the operation holds besides its own resource: a quota, the status of its source."""


class Deletion(OperationKind):
    """Removes the file of a resource, then its row."""

    failure_status = ERROR_DELETING

    async def run(self, attempt: Attempt) -> Apply:
        """Remove the file."""
        id = attempt.operation.resource_id
        await self.prepare(id)
        await self.files.remove(self.directory, id)
        return lambda conn, now: self.forget(conn, id)

    async def prepare(self, id: str) -> None:
        """Do what comes before the file is removed; raise Failed if it must stay."""

    @abstractmethod
    def forget(self, conn: sa.Connection, id: str) -> None:
        """Delete the row, if it is there, and release what it uses of the quota."""
