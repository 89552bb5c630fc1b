"""What all parts of the identity service share: its database, clock, keys and the set of revocations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.embedded.identity.blobs import BlobBox
from micronova.embedded.identity.lockout import Lockout
from micronova.embedded.identity.passwords import Passwords
from micronova.embedded.identity.store.revocations import RevocationTime
from micronova.http.request import Request
from micronova.http.revocation_subjects import Subject
from micronova.http.tokens import Claims, Revocations, TokenSigner, TokenVerifier
from micronova.objects.clock import Clock, micros, seconds
from micronova.objects.errors import Conflict

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_DOMAIN = "default"
COMMIT_ALLOWANCE = 200_000  # microseconds within which a transaction commits
TOKENS_MEANWHILE = 10_000  # that are issued at most until it commits


class Timestamps:
    """Times in microseconds that strictly increase and are later than every revocation that we know of.

    A revocation concerns the tokens that were issued at or before its time. So no two of these times may be equal,
    even when the clock is set back, and a token that is issued after a revocation must have a later time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = 0

    def next(self) -> int:
        """Return the time, or the time after the last one that was returned."""
        self._last = max(micros(self._clock.now()), self._last + 1)
        return self._last

    def after_commit(self) -> int:
        """Return a time later than that of each token that is issued until a transaction has committed.

        It adds nothing to a time that is in the future already: tokens must not be dated far ahead after many
        revocations.
        """
        return max(micros(self._clock.now()) + COMMIT_ALLOWANCE, self._last + TOKENS_MEANWHILE)

    def advance_past(self, time: int) -> None:
        """Make all further times later than this one."""
        self._last = max(self._last, time)


@dataclass(frozen=True, kw_only=True)
class Core:
    """What the service's constructor gives to every API class and function."""

    database: Database
    clock: Clock
    timestamps: Timestamps
    new_id: Callable[[], str]
    passwords: Passwords
    lockout: Lockout
    signer: TokenSigner
    verifier: TokenVerifier
    revocations: Revocations
    blobs: BlobBox
    token_lifetime: float
    elsewhere: Mapping[tuple[str, str], str]  # of OwnURLs

    def now(self) -> int:
        """Return the time in microseconds."""
        return micros(self.clock.now())

    def claims(self, request: Request) -> Claims:
        """Return what the caller's token says."""
        return self.verifier.verify(request.context.token, self.clock.now())

    def revocation_time(self) -> RevocationTime:
        """Return the time of a revocation that a transaction is about to make.

        It is later than the commit. An authentication that still reads what the transaction changes begins before it,
        and so gets a token that is revoked.
        """
        at = self.timestamps.after_commit()
        return RevocationTime(at, at + micros(self.token_lifetime))

    async def write(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a transaction that writes; raise Conflict if it breaks a constraint because of a concurrent one."""
        try:
            return await self.database.write(fn, *args, **kwargs)
        except sa.exc.IntegrityError:
            raise Conflict("The resource was changed by another request at the same moment: try again.") from None

    async def write_revoking(
        self,
        fn: Callable[Concatenate[sa.Connection, RevocationTime, P], tuple[R, list[Subject]]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run a transaction that writes and may revoke tokens; revoke them in memory after the commit.

        `fn` returns its result and the subjects whose tokens it revoked in the database.
        """
        time = self.revocation_time()
        result, subjects = await self.write(fn, time, *args, **kwargs)
        self.timestamps.advance_past(time.at)
        for subject in subjects:
            self.revocations.revoke_all(subject, seconds(time.at), seconds(time.expires_at))
        return result
