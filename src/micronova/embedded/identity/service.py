"""The identity role: Keystone's v3 API over a database of its own."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from micronova.db import schema
from micronova.db.engine import Database
from micronova.embedded.identity import bootstrap, lockout
from micronova.embedded.identity.api.routes import all_routes
from micronova.embedded.identity.authentication import EC2_METHOD
from micronova.embedded.identity.blobs import BlobBox
from micronova.embedded.identity.core import Core, Timestamps
from micronova.embedded.identity.passwords import Passwords
from micronova.embedded.identity.store import revocations as revocations_store
from micronova.embedded.identity.tables import metadata
from micronova.http.auth import SignedTokens
from micronova.http.faults import identity_fault
from micronova.http.service import Observer, Service
from micronova.http.tokens import REVOCATION_OVERLAP, Revocations, TokenKey, TokenSigner, TokenVerifier, in_use
from micronova.objects.background import end_tasks, keep_running
from micronova.objects.clock import Clock, SystemClock, micros, seconds
from micronova.objects.context import RequestContext
from micronova.objects.errors import Forbidden
from micronova.policies.enforcer import Enforcer
from micronova.policies.identity import RULES

log = logging.getLogger(__name__)

MIGRATIONS = "micronova.embedded.identity.migrations"
SWEEP = 3600.0  # seconds between deletions of old revocations
KEYS_POLL = 30.0  # seconds between reads of the keys that sign tokens


class IdentityTokens(SignedTokens):
    """Tokens that are good for requests to this service: not those for the signature of a request to another one."""

    async def authenticate(self, token: str | None, context: RequestContext) -> RequestContext:
        """Verify a token; raise Forbidden if it was issued for an EC2 signature."""
        caller = await super().authenticate(token, context)
        if EC2_METHOD in self.verifier.verify(caller.token, self.now()).methods:
            raise Forbidden("A token for an EC2 signature is not valid for the identity service.")
        return caller


class IdentityService:
    """The embedded identity service.

    `service.app` is its ASGI application. The other services of this process check tokens with `verifier` and
    `revocations`; services of other processes check them with the public keys.
    """

    def __init__(
        self,
        *,
        database: Database,
        clock: Clock | None = None,
        token_keys: Callable[[], Sequence[TokenKey]],
        secret_keys: Sequence[bytes],
        token_lifetime: float = 4 * 3600.0,
        region: str = "RegionOne",
        mount: str = "/identity",
        public_url: str | None = None,
        elsewhere: Mapping[tuple[str, str], str] | None = None,
        policy_file: Path | None = None,
        observer: Observer | None = None,
        db_schema: str | None = None,
        revocation_poll: float | None = None,
        passwords: Passwords | None = None,
        lockout_attempts: int = lockout.ATTEMPTS,
        lockout_seconds: float = lockout.SECONDS,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        """Wire the service and load the keys that sign tokens; start nothing.

        `elsewhere` says where services in other processes are: see OwnURLs.
        The first of `secret_keys` encrypts the secrets that users keep in credentials; any of them decrypts.
        `token_keys` is called again every KEYS_POLL seconds: it returns the keys with the times from which they sign.
        `revocation_poll` is the number of seconds between reads of the revocations that other processes on the same
        database have made. The default is 2 on PostgreSQL; SQLite has only one process and is not polled.
        """
        self._database = database
        self._token_keys = token_keys
        self._clock = clock or SystemClock()
        self._schema = db_schema
        self._region = region
        self._poll = (
            revocation_poll if revocation_poll is not None else (2.0 if database.dialect == "postgresql" else None)
        )
        self._seen = 0  # revocations up to this time are in memory
        self._task: asyncio.Task[None] | None = None
        self._keys = in_use(token_keys(), self._clock.now(), token_lifetime)
        signer = TokenSigner(self._keys)
        self.revocations = Revocations()
        self.verifier = TokenVerifier([key.public for key in self._keys], self.revocations)
        self.authenticator = IdentityTokens(self.verifier, self._clock.now)
        self.core = Core(
            database=database,
            clock=self._clock,
            timestamps=Timestamps(self._clock),
            new_id=new_id,
            passwords=passwords or Passwords(),
            lockout=lockout.Lockout(self._clock.monotonic, attempts=lockout_attempts, seconds=lockout_seconds),
            signer=signer,
            verifier=self.verifier,
            revocations=self.revocations,
            blobs=BlobBox(secret_keys[0], secret_keys[1:]),
            token_lifetime=token_lifetime,
            elsewhere=elsewhere or {},
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
        """Bring the schema up to date and load the revocations."""
        await schema.upgrade(self._database, metadata, MIGRATIONS, schema=self._schema)
        await self.load_revocations()
        self._task = keep_running(self._maintain, name="identity-revocations", clock=self._clock)

    async def stop(self) -> None:
        """Stop the periodic work and the hashing threads; the caller closes the database."""
        await end_tasks(self._task)
        self._task = None
        self.core.passwords.close()

    async def bootstrap(
        self,
        admin_password: str,
        demo_password: str,
        service_password: str,
        endpoints: Mapping[str, str],
        *,
        service_user: str = bootstrap.SERVICE_USER,
        reset_passwords: bool = False,
    ) -> None:
        """Create the first domain, projects, users, roles and the catalog, as far as they are missing.

        `endpoints` maps the type of a service to its path below the cloud's own URL, or to a complete URL.
        """
        passwords = {service_user: service_password} | {"admin": admin_password, "demo": demo_password}
        if service_user in ("admin", "demo"):  # who have passwords of their own
            service_user = bootstrap.SERVICE_USER
        await bootstrap.bootstrap(
            self.core, passwords, endpoints, self._region, service_user=service_user, reset=reset_passwords
        )

    async def load_revocations(self) -> None:
        """Read the revocations of all processes since the last read."""
        now = self.core.now()
        for each in await self._database.read(revocations_store.since, self._seen - micros(REVOCATION_OVERLAP), now):
            self.revocations.record(each.subject, seconds(each.at), seconds(each.expires_at))
            self.core.timestamps.advance_past(each.at)
        self._seen = now

    def load_keys(self) -> None:
        """Read the keys that sign tokens; forget those whose tokens have all expired."""
        keys = in_use(self._token_keys(), self._clock.now(), self.core.token_lifetime)
        if keys != self._keys:
            self._keys = keys
            self.core.signer.use(keys)
            self.verifier.use([key.public for key in keys])
            log.info("the keys of tokens have changed: there are %s", len(keys))

    async def _maintain(self) -> None:
        """Read the keys and the revocations of other processes, and delete old revocations."""
        swept = self._clock.monotonic()
        read = swept
        while True:
            await self._clock.sleep(min(self._poll or KEYS_POLL, KEYS_POLL))
            try:
                if self._clock.monotonic() - read >= KEYS_POLL:
                    read = self._clock.monotonic()
                    self.load_keys()
                if self._poll:
                    await self.load_revocations()
                if self._clock.monotonic() - swept >= SWEEP:
                    swept = self._clock.monotonic()
                    await self._database.write(revocations_store.forget, self.core.now())
                    self.revocations.forget_expired(self._clock.now())
            except Exception:  # the database may not answer for a while; tokens are still checked
                log.warning("could not read keys, or read or delete revocations; trying again later", exc_info=True)
