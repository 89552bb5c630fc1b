"""What all parts of the identity service share: its database, clock, keys and the set of revocations."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from micronova.db.engine import Database
from micronova.http.tokens import Revocations, TokenSigner, TokenVerifier
from micronova.neighbours.identity.lockout import Lockout
from micronova.neighbours.identity.passwords import Passwords
from micronova.neighbours.identity.store.revocations import Moment
from micronova.objects.clock import Clock, micros
from micronova.objects.errors import Conflict

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_DOMAIN = "default"
AHEAD = 200_000  # microseconds that a transaction of ours may take


class Ticks:
    """Microseconds that only ever grow, and are later than every revocation that we know of.

    A token is void when it was issued up to the moment of a revocation. So no two of these moments may be the same,
    whatever the clock does, and a token that is issued after a revocation must also say so.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = 0

    def next(self) -> int:
        """Return a moment of its own."""
        self._last = max(micros(self._clock.now()), self._last + 1)
        return self._last

    def pass_by(self, moment: int) -> None:
        """Let all further moments be after this one."""
        self._last = max(self._last, moment)


@dataclass(frozen=True, kw_only=True)
class Core:
    """Given to every part by the service's constructor."""

    database: Database
    clock: Clock
    ticks: Ticks
    new_id: Callable[[], str]
    passwords: Passwords
    lockout: Lockout
    signer: TokenSigner
    verifier: TokenVerifier
    revocations: Revocations
    token_lifetime: float
    public_url: str | None = None

    @property
    def now(self) -> int:
        """The time in microseconds."""
        return micros(self.clock.now())

    def moment(self) -> Moment:
        """Return the moment of a revocation that a transaction is about to make.

        It lies a little ahead, beyond the commit: a log-in that still reads what the transaction changes begins
        before it, and so gets a token that is void.
        """
        at = self.ticks.next() + AHEAD
        return Moment(at, at + micros(self.token_lifetime))

    async def read(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a reading transaction."""
        return await self.database.read(fn, *args, **kwargs)

    async def write(self, fn: Callable[Concatenate[sa.Connection, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a writing transaction; a collision with another that ran at the same moment is a Conflict."""
        try:
            return await self.database.write(fn, *args, **kwargs)
        except sa.exc.IntegrityError:
            raise Conflict("The resource was changed by another request at the same moment: try again.") from None

    def apply(self, subjects: Iterable[str], moment: Moment) -> None:
        """Void in memory what a committed transaction voided in the database; tokens from now on are good."""
        self.ticks.pass_by(moment.at)
        for subject in subjects:
            self.revocations.revoke_all(subject, moment.at / 1_000_000)
