"""A tour of the cloud with the real `openstack` client, unmodified, against `micronova up`.

The steps are in `tests/tour`: one module for each family of commands. They run in one interpreter of the client, which
runs the client's own `main` for each command.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.tour")

from tests.command import UpCloud  # noqa: E402
from tests.osc import OpenStackClient  # noqa: E402
from tests.tour import hosts, identity, images, moves, networks, placement, servers, soft_delete, volumes  # noqa: E402

pytestmark = pytest.mark.timeout(300)

SETTINGS = """
[quota]
instances = 200
cores = 400
ram = 1000000

[[fake.rules]]
operation = "live_migrate"
kind = "delay"
delay = 600
metadata = { tour = "slow" }
"""


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCloud]:
    """A cloud with several hosts and room for many servers."""
    cloud = UpCloud(tmp_path_factory.mktemp("tour") / "cloud", "--hosts", "4", settings=SETTINGS)
    cloud.up()
    yield cloud
    cloud.down()
    assert "Traceback" not in cloud.log


@pytest.fixture(scope="module")
def osc(cloud: UpCloud) -> Iterator[OpenStackClient]:
    """The client; all tests share its interpreter."""
    client = OpenStackClient(cloud.directory / "clouds.yaml")
    yield client
    client.close()


def test_identity(osc: OpenStackClient) -> None:
    identity.catalog(osc)
    identity.domains(osc)
    identity.people(osc)
    identity.application_credentials(osc)
    identity.credentials(osc)
    identity.trusts(osc)
    identity.limits(osc)


def test_volumes(osc: OpenStackClient) -> None:
    volumes.volumes(osc)
    volumes.snapshots(osc)
    volumes.backups(osc)
    volumes.transfers(osc)
    volumes.types(osc)


def test_volumes_of_servers(osc: OpenStackClient) -> None:
    volumes.attachments(osc)
    volumes.servers_with_volumes(osc)
    volumes.servers_on_volumes(osc)


def test_volumes_for_operators(osc: OpenStackClient) -> None:
    volumes.operators(osc)
    of_volumes = {
        each for each in osc.commands if each.startswith(("volume ", "block storage ")) or each in volumes.OTHERS
    }
    assert len(of_volumes) >= 80, sorted(of_volumes)


def test_flavors_keys_and_quotas(osc: OpenStackClient, tmp_path: Path) -> None:
    identity.flavors(osc)
    identity.keys(osc, tmp_path)
    identity.quotas(osc)


def test_images(osc: OpenStackClient, tmp_path: Path) -> None:
    images.images(osc, tmp_path)
    images.imports(osc, tmp_path)
    images.tasks(osc)
    images.metadata_definitions(osc)


def test_networks(osc: OpenStackClient) -> None:
    networks.networks(osc)
    networks.subnet_pools(osc)
    networks.security_groups(osc)
    networks.qos(osc)
    networks.trunks(osc)
    networks.sharing(osc)
    networks.default_rules(osc)
    networks.agents(osc)


def test_hosts(osc: OpenStackClient, cloud: UpCloud) -> None:
    hosts.hosts(osc)
    hosts.aggregates(osc, cloud)
    hosts.maintenance(osc)


def test_placement(osc: OpenStackClient, cloud: UpCloud) -> None:
    placement.names(osc)
    placement.providers(osc)
    placement.allocations(osc)
    assert cloud.audit() == []


def test_life_of_a_server(osc: OpenStackClient) -> None:
    servers.life(osc)
    servers.consoles(osc)


def test_what_is_done_to_a_server(osc: OpenStackClient, cloud: UpCloud) -> None:
    servers.states(osc)
    servers.images_of_servers(osc)
    servers.interfaces(osc)
    assert cloud.audit() == []


def test_moves(osc: OpenStackClient, cloud: UpCloud) -> None:
    moves.resizes(osc)
    moves.migrations(osc)
    moves.live_migrations_under_way(osc)
    moves.evacuation(osc)
    assert cloud.audit() == []


def test_many_servers(osc: OpenStackClient, cloud: UpCloud) -> None:
    servers.fifty_at_once(osc)
    servers.project_cleanup(osc)
    assert cloud.audit() == []


def test_what_users_get_wrong(osc: OpenStackClient) -> None:
    servers.mistakes(osc)


def test_soft_delete(osc: OpenStackClient, cloud: UpCloud) -> None:
    """The cloud starts again with soft delete; after it the audit is clean."""
    cloud.down()
    cloud.settings = f"[default]\nreclaim_instance_interval = 3600\n{SETTINGS}"
    cloud.up()
    soft_delete.restore(osc)
    assert cloud.audit() == []


def test_number_of_commands(osc: OpenStackClient, request: pytest.FixtureRequest) -> None:
    """The whole tour uses at least 250 different commands."""
    ran = {item.name for item in request.session.items if item.path == request.path}
    if all(name in ran for name in globals() if name.startswith("test_")):
        assert len(osc.commands) >= 250, sorted(osc.commands)
