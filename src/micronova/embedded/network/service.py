"""The network role: OpenStack's network API v2.0 over a database of its own."""

import random
from typing import Any

import falcon.asgi

from micronova.db.engine import Database
from micronova.db.schema import upgrade
from micronova.embedded.common.compute_events import EventSender
from micronova.embedded.network.address_scopes import AddressScopes
from micronova.embedded.network.agent_calls import AgentCallHandlers
from micronova.embedded.network.agents import Agents
from micronova.embedded.network.collection import Collection
from micronova.embedded.network.core import Core, NetworkServiceSettings
from micronova.embedded.network.default_security_group_rules import (
    DefaultSecurityGroupRules,
    create_initial_default_rules,
)
from micronova.embedded.network.documents import Documents
from micronova.embedded.network.errors import fault_body
from micronova.embedded.network.floatingips import FloatingIPs
from micronova.embedded.network.ip_availability import IPAvailability
from micronova.embedded.network.networks import Networks
from micronova.embedded.network.port_events import LOST, OUTBOX
from micronova.embedded.network.ports import Ports
from micronova.embedded.network.qos_policies import QosPolicies
from micronova.embedded.network.qos_rules import QOS_RULE_TYPES, QosRules, QosRuleTypes
from micronova.embedded.network.quotas import Quotas
from micronova.embedded.network.rbac_policies import RbacPolicies
from micronova.embedded.network.routers import Routers
from micronova.embedded.network.security_group_rules import SecurityGroupRules
from micronova.embedded.network.security_groups import SecurityGroups
from micronova.embedded.network.state_watch import StateWatch
from micronova.embedded.network.subnetpools import SubnetPools
from micronova.embedded.network.subnets import Subnets
from micronova.embedded.network.tables import metadata
from micronova.embedded.network.tags import TagRoutes
from micronova.embedded.network.topology import Builder, Topologies
from micronova.embedded.network.trunks import Trunks
from micronova.http.client import ServiceClient
from micronova.http.service import Authenticator, Observer, Policy, Route, Service
from micronova.objects.clock import Clock

MIGRATIONS = "micronova.embedded.network.migrations"
PRIVATE_CIDR = "10.0.0.0/20"  # about four thousand addresses
PUBLIC_CIDR = "203.0.113.0/24"
SUBNET_POOL_PREFIX = "10.64.0.0/12"  # ranges of auto-allocated networks come from here

COLLECTIONS: tuple[type[Collection[Any]], ...] = (
    Networks,
    Subnets,
    SubnetPools,
    AddressScopes,
    Ports,
    SecurityGroups,
    SecurityGroupRules,
    DefaultSecurityGroupRules,
    Routers,
    Trunks,
    FloatingIPs,
    QosPolicies,
    RbacPolicies,
    Agents,
    IPAvailability,
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
        random_source: random.Random | None = None,
        settings: NetworkServiceSettings | None = None,
        public_url: str | None = None,
        mount: str = "/network",
        observer: Observer | None = None,
    ) -> None:
        """`compute` receives events of ports; `schema` is for PostgreSQL."""
        self.database = database
        self._schema = schema
        self.events = EventSender(database, clock, compute, OUTBOX, name="network", lost=LOST)
        settings = settings or NetworkServiceSettings()
        self.core = Core(
            database,
            clock,
            random_source or random.Random(),  # ids need not be secret
            settings,
            self.events,
            wake_agents=lambda: self.watch.look_soon(),
        )
        self.watch = StateWatch(database, clock, self.core.agent_times)
        self._agents = AgentCallHandlers(self.core, self.watch)
        self.service = Service(
            "network",
            routes(self.core) + self._agents.routes(),
            policy=policy,
            authenticator=authenticator,
            fault_body=fault_body,
            mount=mount,
            public_url=public_url,
            observer=observer,
            max_body=1 << 20,  # for bulk creates of hundreds of ports
        )
        self.service.app.add_middleware(_Suffix())

    async def start(self) -> None:
        """Bring the schema up to date and start to send events to compute."""
        await upgrade(self.database, metadata, MIGRATIONS, schema=self._schema)
        await create_initial_default_rules(self.core)
        await self.events.start()
        await self.watch.start()

    def end_waits(self) -> None:
        """Answer the agents that wait for changes, so that the HTTP server can stop."""
        self.watch.end_waits()

    async def stop(self) -> None:
        """Stop sending events; those that are not sent stay in the outbox."""
        await self._agents.heartbeats.stop()
        await self.watch.stop()
        await self.events.stop()

    async def bootstrap(
        self,
        project_id: str = "",
        *,
        private_cidr: str = PRIVATE_CIDR,
        public_cidr: str = PUBLIC_CIDR,
        pool_prefix: str = SUBNET_POOL_PREFIX,
        dns_nameservers: tuple[str, ...] = (),
    ) -> bool:
        """Create the first networks of a new cloud, once; return whether they were created now.

        Without a project everybody may use them, only admins may change them, and no quota counts them.
        """
        plan = {
            "private_cidr": private_cidr,
            "public_cidr": public_cidr,
            "pool_prefix": pool_prefix,
            "dns_nameservers": dns_nameservers,
        }
        return await self.core.write_and_wake(Builder(self.core).first_networks, project_id, plan)


def routes(core: Core) -> list[Route]:
    """Return the routes of the service."""
    found = Documents(core, [(each.singular, each.slug) for each in COLLECTIONS]).routes()
    for kind in COLLECTIONS:
        collection = kind(core)
        found += collection.routes()
        if collection.attributes.taggable:
            found += TagRoutes(collection).routes()
    # Neutron has the tags of QoS policies here, and the policies themselves below /qos.
    found += TagRoutes(QosPolicies(core), "/v2.0/policies").routes()
    for rule_type in QOS_RULE_TYPES:
        found += QosRules(core, rule_type).routes()
    found += QosRuleTypes().routes()
    return found + Quotas(core).routes() + Topologies(core).routes()


class _Suffix:
    """Middleware for old clients, which request `/v2.0/networks.json`."""

    async def process_request(self, http: falcon.asgi.Request, answer: falcon.asgi.Response) -> None:
        """Remove the suffix from the path."""
        if http.path.endswith(".json"):
            http.path = http.path[:-5]
