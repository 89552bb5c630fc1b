"""The identity role: Keystone's v3 API over a database of its own."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from micronova.db import schema
from micronova.db.engine import Database
from micronova.http.auth import SignedTokens
from micronova.http.faults import identity_fault
from micronova.http.service import Observer, Service
from micronova.http.tokens import Revocations, TokenSigner, TokenVerifier
from micronova.neighbours.identity import bootstrap, keys
from micronova.neighbours.identity.api.routes import all_routes
from micronova.neighbours.identity.core import Core, Ticks
from micronova.neighbours.identity.lockout import Lockout
from micronova.neighbours.identity.passwords import Passwords
from micronova.neighbours.identity.store import revocations as revocations_store
from micronova.neighbours.identity.tables import metadata
from micronova.objects.clock import Clock, SystemClock
from micronova.policies.enforcer import Enforcer
from micronova.policies.identity import RULES

log = logging.getLogger(__name__)

MIGRATIONS = "micronova.neighbours.identity.migrations"
SWEEP = 3600.0  # seconds between looks for revocations that no longer matter
OVERLAP = 60_000_000  # microseconds that a look for revocations of other processes reaches back


class IdentityService:
    """The embedded identity service.

    `service.app` is its ASGI application; `verifier` and `revocations` let the other services of this process check
    tokens without asking, `public_key` those of other processes.
    """

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock | None = None,
        keys_directory: Path | None = None,
        signing_key: bytes | None = None,
        token_lifetime: float = 4 * 3600.0,
        region: str = "RegionOne",
        mount: str = "/identity",
        public_url: str | None = None,
        policy_file: Path | None = None,
        observer: Observer | None = None,
        db_schema: str | None = None,
        revocation_poll: float | None = None,
        passwords: Passwords | None = None,
        lockout_attempts: int = 5,
        lockout_seconds: float = 60.0,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        """Wire the service; nothing is read or started yet, but the signing key (given, or in `keys_directory`).

        `revocation_poll`: seconds between looks for what other processes on the same database revoked; by default 2
        on PostgreSQL and never on SQLite, which one process has for itself.
        """
        if signing_key is None:
            if keys_directory is None:
                raise ValueError("IdentityService needs a signing_key or a keys_directory.")
            signing_key = keys.load_or_make(keys_directory)
        self._database = database
        self._clock = clock or SystemClock()
        self._schema = db_schema
        self._region = region
        self._poll = (
            revocation_poll if revocation_poll is not None else (2.0 if database.dialect == "postgresql" else None)
        )
        self._seen = 0  # revocations up to this moment are in memory
        self._task: asyncio.Task[None] | None = None
        signer = TokenSigner(signing_key)
        self.public_key = signer.public_key
        self.revocations = Revocations()
        self.verifier = TokenVerifier(self.public_key, self.revocations)
        self.authenticator = SignedTokens(self.verifier, self._clock.now)
        self.core = Core(
            database=database,
            clock=self._clock,
            ticks=Ticks(self._clock),
            new_id=new_id,
            passwords=passwords or Passwords(),
            lockout=Lockout(self._clock.monotonic, attempts=lockout_attempts, seconds=lockout_seconds),
            signer=signer,
            verifier=self.verifier,
            revocations=self.revocations,
            token_lifetime=token_lifetime,
        )
        self.service = Service(
            "identity",
            all_routes(self.core),
            policy=Enforcer(RULES, policy_file),
            authenticator=self.authenticator,
            fault_body=identity_fault,
            mount=mount,
            public_url=public_url,
            observer=observer,
        )

    async def start(self) -> None:
        """Bring the schema up to date and load what was revoked."""
        await schema.upgrade(self._database, metadata, MIGRATIONS, schema=self._schema)
        await self.load_revocations()
        self._task = asyncio.create_task(self._maintain(), name="identity-revocations")

    async def stop(self) -> None:
        """Stop the periodic work and the hashing threads; the database is the caller's to close."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self.core.passwords.close()

    async def bootstrap(
        self,
        admin_password: str,
        demo_password: str,
        service_password: str,
        endpoints: Mapping[str, str],
        *,
        reset_passwords: bool = False,
    ) -> None:
        """Make the first domain, projects, users, roles and the catalog, as far as they are missing.

        `endpoints` maps a service's type to its path below the cloud's own URL (or to a whole URL elsewhere).
        """
        passwords = {"admin": admin_password, "demo": demo_password, bootstrap.SERVICE_USER: service_password}
        await bootstrap.bootstrap(self.core, passwords, endpoints, self._region, reset_passwords)

    async def load_revocations(self) -> None:
        """Read what was revoked, since the last look, by whichever process."""
        now = self.core.now
        for each in await self._database.read(revocations_store.since, self._seen - OVERLAP, now):
            if each.subject.startswith("audit:"):
                self.revocations.revoke(each.subject.removeprefix("audit:"), each.expires_at / 1_000_000)
            else:
                self.revocations.revoke_all(each.subject, each.at / 1_000_000)
            self.core.ticks.pass_by(each.at)
        self._seen = now

    async def _maintain(self) -> None:
        """Follow other processes, and forget what no longer matters."""
        swept = self._clock.monotonic()
        while True:
            await self._clock.sleep(self._poll or SWEEP)
            try:
                if self._poll:
                    await self.load_revocations()
                if self._clock.monotonic() - swept >= SWEEP:
                    swept = self._clock.monotonic()
                    await self._database.write(revocations_store.forget, self.core.now)
                    self.revocations.forget_expired(self._clock.now(), self.core.token_lifetime)
            except Exception:  # the database may be away for a while; tokens are checked all the same
                log.warning("revocations could not be read or cleaned up", exc_info=True)
