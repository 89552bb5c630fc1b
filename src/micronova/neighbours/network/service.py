"""The network role: OpenStack's network API v2.0 over a database of its own."""

import random
from collections.abc import Mapping
from typing import Any

import falcon.asgi

from micronova.db.engine import Database
from micronova.db.schema import upgrade
from micronova.http.client import ServiceClient
from micronova.http.service import Authenticator, Observer, Policy, Route, Service
from micronova.neighbours.network.agent_api import AgentRoutes, Changes, Watched
from micronova.neighbours.network.collection import Collection
from micronova.neighbours.network.core import QUOTAS, Core, Settings
from micronova.neighbours.network.documents import Agents, Availability, Documents
from micronova.neighbours.network.errors import fault_body
from micronova.neighbours.network.floatingips import FloatingIPs
from micronova.neighbours.network.networks import Networks
from micronova.neighbours.network.notifier import Notifier
from micronova.neighbours.network.ports import Ports
from micronova.neighbours.network.qos_policies import Policies
from micronova.neighbours.network.qos_rules import BandwidthRules, RuleTypes
from micronova.neighbours.network.quotas import Quotas
from micronova.neighbours.network.routers import Routers
from micronova.neighbours.network.rules import Rules
from micronova.neighbours.network.security_groups import SecurityGroups
from micronova.neighbours.network.subnetpools import SubnetPools
from micronova.neighbours.network.subnets import Subnets
from micronova.neighbours.network.tables import metadata
from micronova.neighbours.network.tags import TagRoutes
from micronova.neighbours.network.topology import Builder, Topologies
from micronova.objects.clock import Clock
from micronova.policies.network import NAMES

MIGRATIONS = "micronova.neighbours.network.migrations"
PRIVATE_CIDR = "10.0.0.0/20"  # room for some four thousand servers
PUBLIC_CIDR = "203.0.113.0/24"
POOL_PREFIX = "10.64.0.0/12"  # where networks that are made automatically get their ranges

COLLECTIONS: tuple[type[Collection], ...] = (
    Networks,
    Subnets,
    SubnetPools,
    Ports,
    SecurityGroups,
    Rules,
    Routers,
    FloatingIPs,
    Policies,
    Agents,
    Availability,
)


class NetworkService:
    """The network role."""

    def __init__(
        self,
        database: Database,
        policy: Policy,
        authenticator: Authenticator,
        clock: Clock,
        compute: ServiceClient | None = None,
        *,
        schema: str | None = None,
        chance: random.Random | None = None,
        quotas: Mapping[str, int] | None = None,
        public_url: str | None = None,
        mount: str = "/network",
        observer: Observer | None = None,
        **settings: Any,
    ) -> None:
        """`compute` is told about ports (None: nobody is); `schema` is PostgreSQL's; `settings` are `core.Settings`."""
        self.database = database
        self._schema = schema
        self.notifier = Notifier(database, clock, compute)
        changes = Changes()
        self.core = Core(
            Watched(database, changes),
            clock,
            chance or random.Random(),  # seeded by the system; ids need not be secrets
            Settings(quotas={**QUOTAS, **(quotas or {})}, **settings),
            self.notifier,
        )
        self.service = Service(
            "network",
            routes(self.core) + AgentRoutes(self.core, changes).routes(),
            policy=policy,
            authenticator=authenticator,
            fault_body=fault_body,
            mount=mount,
            public_url=public_url,
            observer=observer,
            max_body=1 << 20,  # bulk creates of hundreds of ports
        )
        self.service.app.add_middleware(_Suffix())

    async def start(self) -> None:
        """Bring the schema up to date and begin to tell compute."""
        await upgrade(self.database, metadata, MIGRATIONS, schema=self._schema)
        await self.notifier.start()

    async def stop(self) -> None:
        """Stop telling compute; what it has not heard stays in the outbox."""
        await self.notifier.stop()

    async def bootstrap(
        self,
        project_id: str = "",
        *,
        private_cidr: str = PRIVATE_CIDR,
        public_cidr: str = PUBLIC_CIDR,
        pool_prefix: str = POOL_PREFIX,
        dns_nameservers: tuple[str, ...] = (),
    ) -> bool:
        """Make, once, the networks that a new cloud begins with; say whether they were made just now.

        Without a project they are nobody's: everybody may use them, admins may change them, no quota counts them.
        """
        plan = {
            "private_cidr": private_cidr,
            "public_cidr": public_cidr,
            "pool_prefix": pool_prefix,
            "dns_nameservers": dns_nameservers,
        }
        return await self.database.write(Builder(self.core).first_networks, project_id, plan)


def routes(core: Core) -> list[Route]:
    """Return every operation of the service."""
    found = Documents(core).routes()
    for kind in COLLECTIONS:
        collection = kind(core)
        found += collection.routes()
        if collection.taggable:
            found += [each for each in TagRoutes(collection).routes() if each.policy in NAMES]
    found += BandwidthRules(core).routes() + RuleTypes().routes()
    return found + Quotas(core).routes() + Topologies(core).routes()


class _Suffix:
    """Old clients write `/v2.0/networks.json`."""

    async def process_request(self, req: falcon.asgi.Request, resp: falcon.asgi.Response) -> None:
        """Take the suffix off."""
        if req.path.endswith(".json"):
            req.path = req.path[:-5]
