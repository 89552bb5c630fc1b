"""The network agent of this host."""

from micronova.cli.wiring import Process, Role
from micronova.embedded.network.agent.agent import NetworkAgent
from micronova.embedded.network.agent.client import NetworkServiceClient
from micronova.embedded.network.agent.dhcp import DNS_DOMAIN
from micronova.embedded.network.agent.metadata import MetadataLimits, MetadataProxy
from micronova.privileged.client import PrivilegedClient, helper_socket
from micronova.privileged.names import prefix_of


async def make(process: Process) -> Role:
    """Make the network agent of this host."""
    clients = process.clients
    keys = clients.host_keys()
    prefix = prefix_of(process.cloud_id)
    privileged = PrivilegedClient(helper_socket(prefix))
    settings = process.settings.network_agent
    limits = MetadataLimits(
        per_guest=settings.metadata_connections_per_guest,
        per_network=settings.metadata_connections_per_network,
        total=settings.metadata_connections,
        timeout=settings.metadata_timeout,
    )
    return NetworkAgent(
        NetworkServiceClient(clients.network_agent_client(keys), process.host),
        privileged,
        process.clock,
        prefix=prefix,
        domain=DNS_DOMAIN,
        connections=settings.connections_per_port,
        metadata=MetadataProxy(privileged, clients.metadata(), keys, limits),
    )
