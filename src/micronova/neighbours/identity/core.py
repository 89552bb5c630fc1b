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


@dataclass(frozen=True, kw_only=True)
class Core:
    """Given to every part by the service's constructor."""

    database: Database
    clock: Clock
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
        """Return now, as revocations need it."""
        now = self.now
        return Moment(now, now + micros(self.token_lifetime))

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
        """Void in memory what a committed transaction voided in the database."""
        for subject in subjects:
            self.revocations.revoke_all(subject, moment.at / 1_000_000)
