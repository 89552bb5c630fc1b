"""`micronova check` passes a region that works, and finds each mistake in its settings, its broker and its database."""

import asyncio
import contextlib
import http.server
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from micronova.cli.check import report
from micronova.cli.checks.shape import CheckResult
from micronova.cli.main import main
from micronova.cli.names import EMBEDDED_ROLES
from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.conf.settings import load
from micronova.db.secrets import SecretBox, Secrets, key_id
from micronova.privileged import kernel
from tests.cluster import toml
from tests.command import micronova
from tests.services.postgres import Postgres
from tests.services.process import free_port
from tests.services.rabbitmq import RabbitMQ

Sections = dict[str, dict[str, Any]]
PASSWORD = "service-password"
CONTROL = ("api", "conductor", "scheduler")
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Region:
    """A region that runs, and the settings that it runs with."""

    config: Path
    sections: Sections
    postgres: Postgres
    rabbitmq: RabbitMQ
    vhost: str
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def database(self) -> str:
        return str(self.sections["database"]["connection"]).rpartition("/")[2]

    def broker_user(self, configure: str = ".*", write: str = ".*", read: str = ".*") -> str:
        """Make a user of the broker with these rights; return the URL to connect with."""
        name = f"u{uuid4().hex[:8]}"
        url = self.rabbitmq.add_user(name, "secret", self.vhost)
        self.rabbitmq.eval(
            f'rabbit_auth_backend_internal:set_permissions(<<"{name}">>, <<"{self.vhost}">>, '
            f'<<"{configure}">>, <<"{write}">>, <<"{read}">>, <<"tests">>).'
        )
        return url

    def copy_of_database(self) -> str:
        """Make another database with the tables of the region; return its URL."""
        name = f"t{uuid4().hex[:12]}"
        url = self.postgres.create_database(name)
        revision = self.postgres.sql("SELECT version_num FROM alembic_version", self.database)
        self.postgres.sql("CREATE TABLE alembic_version (version_num varchar(32))", name)
        self.postgres.sql(f"INSERT INTO alembic_version VALUES ('{revision}')", name)
        for table in self.postgres.sql(
            "SELECT tablename FROM pg_tables WHERE schemaname='public'", self.database
        ).split():
            if table != "alembic_version":
                self.postgres.sql(f'CREATE TABLE "{table}" (uuid text)', name)
        self.undo.callback(self.postgres.drop_database, name)
        return url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    tmp_path_factory: pytest.TempPathFactory,
    postgres: Postgres,
    rabbitmq: RabbitMQ,
    module_database_url: str,
    module_amqp_url: str,
) -> AsyncIterator[Region]:
    """The processes of a region, with an identity, an image, a network and a volume service of its own."""
    directory = tmp_path_factory.mktemp("region")
    vhost = module_amqp_url.rpartition("/")[2]
    bus = rabbitmq.add_user(f"control-{vhost}", "secret", vhost)
    for_services, for_api = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    services, api = (f"http://127.0.0.1:{each.getsockname()[1]}" for each in (for_services, for_api))
    sections: Sections = {
        "default": {
            "transport_url": bus,
            "control_users": [f"control-{vhost}"],
            "secret_key": "5a" * 32,
            "report_interval": 1.0,
        },
        "database": {"connection": module_database_url, "pool_size": 5},
        "api": {"port": for_api.getsockname()[1]},
        "identity": {"auth_url": f"{services}/identity/v3", "password": PASSWORD},
        "glance": {"endpoint_override": f"{services}/image", "ticket_key": "6b" * 32},
        "neutron": {"endpoint_override": f"{services}/network", "ticket_key": "7c" * 32},
        "cinder": {"endpoint_override": f"{services}/volume/v3"},
        "nova": {"endpoint_override": f"{api}/compute/v2.1"},
    }
    config = directory / "micronova.toml"
    config.write_text(toml(sections))
    started = []
    try:
        for roles, sock in ((EMBEDDED_ROLES, for_services), (CONTROL, for_api)):
            process = Process(load(config, {}), roles, StateDirectory(directory / roles[0]))
            await process.start(sock)
            started.append(process)
        yield Region(config, sections, postgres, rabbitmq, vhost)
    finally:
        for process in reversed(started):
            await process.stop()


@pytest.fixture
def region(running: Region) -> Iterator[Region]:
    """The region; what a test adds to broker and database is removed."""
    yield running
    running.undo.close()


async def _check(*files: Path, roles: tuple[str, ...], directory: Path) -> list[CheckResult]:
    results: list[CheckResult] = []
    await report(roles, files, directory, results.append)
    return results


async def test_a_region_that_works(region: Region, tmp_path: Path) -> None:
    found = await _check(region.config, roles=CONTROL, directory=tmp_path)
    assert [result.line() for result in found if result.outcome != "ok"] == []
    names = {result.name for result in found}
    assert {
        "database compute",
        "broker",
        "rights at the broker",
        "queues",
        "service identity",
        "service image",
    } <= names
    assert {"service network", "service volume", "policy files", "listen addresses", "clock of the database"} <= names


async def test_the_command_prints_json_and_its_exit_code_tells(region: Region, tmp_path: Path) -> None:
    def run(file: Path) -> Any:
        return micronova("check", *CONTROL, "--config", file, "--dir", tmp_path, "--json", timeout=240)

    done = await asyncio.to_thread(run, region.config)
    document = json.loads(done.stdout)
    assert [each for each in document["checks"] if each["outcome"] == "error"] == []
    assert done.returncode == 0 and document["ok"] is True and done.stderr == ""
    assert {"name", "roles", "outcome", "setting", "found", "right"} <= document["checks"][0].keys()
    file = tmp_path / "bad.toml"
    file.write_text(toml(_changed(region.sections, "default", transport_url="amqp://nobody:hush@127.0.0.1:1/")))
    done = await asyncio.to_thread(run, file)
    assert done.returncode == 1 and json.loads(done.stdout)["ok"] is False
    assert "hush" not in done.stdout + done.stderr and "Traceback" not in done.stderr


async def test_an_empty_database_and_vhost_stay_empty(
    region: Region, tmp_path: Path, database_url: str, amqp_url: str
) -> None:
    sections = _changed(region.sections, "default", transport_url=amqp_url, control_users=["guest"])
    sections = _changed(sections, "database", connection=database_url)
    file = tmp_path / "new.toml"
    file.write_text(toml(_changed(sections, "api", port=free_port())))
    found = await _check(file, roles=(*CONTROL, "identity"), directory=tmp_path)
    assert [result.line() for result in found if result.outcome == "error"] == []
    count = "SELECT count(*) FROM pg_tables WHERE schemaname IN ('public', 'identity')"
    assert region.postgres.sql(count, database_url.rpartition("/")[2]) == "0"
    assert not (tmp_path / "keys.json").exists()
    assert region.rabbitmq.ctl("list_queues", "-p", amqp_url.rpartition("/")[2], "name").split() in ([], ["name"])


def _changed(sections: Sections, section: str, **values: Any) -> Sections:
    return {**sections, section: {**sections.get(section, {}), **values}}


# --- mistakes --------------------------------------------------------------------------------------------------


@dataclass
class Mistake:
    """What is done to the good settings, and what the check has to say: the setting, and words of its line."""

    setting: str
    says: tuple[str, ...]
    plant: Callable[[Region, Path, Sections], Sections]
    roles: tuple[str, ...] = CONTROL


def _set(section: str, **values: Any) -> Callable[[Region, Path, Sections], Sections]:
    return lambda region, tmp_path, sections: _changed(sections, section, **values)


def _broker(**rights: str) -> Callable[[Region, Path, Sections], Sections]:
    def plant(region: Region, tmp_path: Path, sections: Sections) -> Sections:
        url = region.broker_user(**rights)
        return _changed(sections, "default", transport_url=url, control_users=[url.split("/")[2].split(":")[0]])

    return plant


def _url(change: Callable[[str], str]) -> Callable[[Region, Path, Sections], Sections]:
    return lambda region, tmp_path, sections: _changed(
        sections, "default", transport_url=change(sections["default"]["transport_url"])
    )


def _file(section: str, option: str, text: str) -> Callable[[Region, Path, Sections], Sections]:
    def plant(region: Region, tmp_path: Path, sections: Sections) -> Sections:
        (tmp_path / "file").write_text(text)
        return _changed(sections, section, **{option: str(tmp_path / "file")})

    return plant


def _database(*statements: str) -> Callable[[Region, Path, Sections], Sections]:
    def plant(region: Region, tmp_path: Path, sections: Sections) -> Sections:
        url = region.copy_of_database()
        name = url.rpartition("/")[2]
        for statement in statements:
            region.postgres.sql(statement.format(name=name), name)
        return _changed(sections, "database", connection=url)

    return plant


def _limited_user(region: Region, tmp_path: Path, sections: Sections) -> Sections:
    user = f"u{uuid4().hex[:8]}"
    region.postgres.sql(f'CREATE ROLE "{user}" LOGIN')
    region.undo.callback(region.postgres.sql, f'DROP ROLE "{user}"')
    region.postgres.sql(f'GRANT SELECT ON ALL TABLES IN SCHEMA public TO "{user}"', region.database)
    region.undo.callback(region.postgres.sql, f'DROP OWNED BY "{user}"', region.database)
    url = sections["database"]["connection"].replace("://micronova@", f"://{user}@")
    return _changed(sections, "database", connection=url)


def _user_of_a_new_database(region: Region, tmp_path: Path, sections: Sections) -> Sections:
    user, name = f"u{uuid4().hex[:8]}", f"t{uuid4().hex[:8]}"
    region.postgres.sql(f'CREATE ROLE "{user}" LOGIN')
    region.undo.callback(region.postgres.sql, f'DROP ROLE "{user}"')
    url = region.postgres.create_database(name).replace("://micronova@", f"://{user}@")
    region.postgres.sql("REVOKE CREATE ON SCHEMA public FROM PUBLIC", name)
    region.undo.callback(region.postgres.drop_database, name)
    return _changed(sections, "database", connection=url)


def _other_queue(region: Region, tmp_path: Path, sections: Sections) -> Sections:
    vhost = f"t{uuid4().hex[:8]}"
    url = region.rabbitmq.add_vhost(vhost)
    region.undo.callback(region.rabbitmq.delete_vhost, vhost)
    region.rabbitmq.eval(
        f'rabbit_amqqueue:declare(rabbit_misc:r(<<"{vhost}">>, queue, <<"micronova.scheduler">>), '
        'true, false, [], none, <<"tests">>).'
    )
    return _changed(sections, "default", transport_url=url, control_users=["guest"])


def _taken_port(region: Region, tmp_path: Path, sections: Sections) -> Sections:
    return _changed(sections, "api", port=_late_server(region))


def _certificate(**wanted: Any) -> Callable[[Region, Path, Sections], Sections]:
    def plant(region: Region, tmp_path: Path, sections: Sections) -> Sections:
        certificate, key = _make_certificate(tmp_path, **wanted)
        sections = _changed(sections, "api", tls_certificate=certificate, port=free_port())
        return _changed(sections, "api", tls_key=key, public_url="https://api.example:8774")

    return plant


def _other_key(region: Region, tmp_path: Path, sections: Sections) -> Sections:
    certificate, _ = _make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, key = _make_certificate(tmp_path / "other")
    return _changed(sections, "api", tls_certificate=certificate, tls_key=key, port=free_port())


def _make_certificate(directory: Path, *, name: str = "api.example", days: int = 90) -> tuple[str, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=100))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (directory / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (directory / "key.pem").write_bytes(private)
    return str(directory / "cert.pem"), str(directory / "key.pem")


class _Late(http.server.BaseHTTPRequestHandler):
    """A service whose clock is an hour slow."""

    def do_GET(self) -> None:
        body = b'{"versions": [], "name": "image"}'
        self.send_response_only(200)
        self.send_header("Date", format_datetime(datetime.now(UTC) - timedelta(hours=1), usegmt=True))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _late_server(region: Region) -> int:
    """Start a program that is none of Micronova; return its port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Late)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    region.undo.callback(server.server_close)
    region.undo.callback(server.shutdown)
    return int(server.server_address[1])


def _slow_clock(region: Region, tmp_path: Path, sections: Sections) -> Sections:
    return _changed(sections, "glance", endpoint_override=f"http://127.0.0.1:{_late_server(region)}")


def _host(**values: Any) -> Callable[[Region, Path, Sections], Sections]:
    """The settings of a compute host, whose broker user may do everything."""

    def plant(region: Region, tmp_path: Path, sections: Sections) -> Sections:
        url = region.broker_user(**values.pop("rights", {}))
        user = url.split("/")[2].split(":")[0]
        users = [user] if values.pop("is_control", False) else sections["default"]["control_users"]
        return {"default": {"transport_url": url, "control_users": users, "host": user, **values}}

    return plant


def _bare_host(region: Region, tmp_path: Path, sections: Sections) -> Sections:
    """A host for real guests whose packages were forgotten."""
    host = _host()(region, tmp_path, sections)
    patch = region.undo.enter_context(pytest.MonkeyPatch.context())
    patch.setenv("PATH", str(tmp_path))
    patch.setattr(kernel, "_PATH", str(tmp_path))
    return {**host, "compute": {"compute_driver": "libvirt"}}


def _closed_log(region: Region, tmp_path: Path, sections: Sections) -> Sections:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    return _changed(sections, "default", log_file=str(closed / "api.log"), user="nobody")


def _nowhere(path: str) -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}{path}"


CREATE = "os_compute_api:servers:create"
COMPUTE = ("compute",)
HOST = ("compute", "network-agent")
MISTAKES = {
    "a section that does not exist": Mistake("", ("no section novaa", "did you mean nova"), _set("novaa", x=1)),
    "a setting that does not exist": Mistake("", ("no setting api.prot", "did you mean port"), _set("api", prot=1)),
    "a value of another type": Mistake("api.port", ("a whole number from 0 to 65535",), _set("api", port="many")),
    "a word that is no choice": Mistake(
        "api.auth_strategy", ("api.auth_strategy", 'one of "keystone", "noauth2"'), _set("api", auth_strategy="keyston")
    ),
    "a key that is too short": Mistake("default.secret_key", ("64 hex",), _set("default", secret_key="5a")),
    "no secret key": Mistake("default.secret_key", ("openssl rand -hex 32",), _set("default", secret_key="")),
    "a key to guess": Mistake("default.secret_key", ("guess", "openssl rand"), _set("default", secret_key="0" * 64)),
    "a ticket key to guess": Mistake("glance.ticket_key", ("guess",), _set("glance", ticket_key="1" * 64)),
    "hosts that are down too soon": Mistake(
        "default.service_down_time", ("three heartbeats", "3 or more"), _set("default", service_down_time=2.0)
    ),
    "leases that are too short": Mistake("conductor.lease", ("3 or more",), _set("conductor", lease=1.0)),
    "a bus within one process": Mistake(
        "default.transport_url", ("only this process", "amqp://"), _set("default", transport_url="local://")
    ),
    "a URL that is no broker's": Mistake(
        "default.transport_url", ("amqp:// or amqps://",), _set("default", transport_url="redis://127.0.0.1/")
    ),
    "a broker that is not there": Mistake(
        "default.transport_url",
        ("nothing accepts connections", "amqp://USER"),
        _url(lambda url: url.replace(url.rpartition(":")[2].partition("/")[0], str(free_port()))),
    ),
    "a wrong password of the broker": Mistake(
        "default.transport_url", ("user and password", "control-"), _url(lambda url: url.replace(":secret@", ":wrong@"))
    ),
    "a vhost that does not exist": Mistake(
        "default.transport_url", ("add_vhost",), _url(lambda url: url.rpartition("/")[0] + "/nowhere")
    ),
    "a broker user that may not declare": Mistake(
        "default.transport_url", ("ACCESS_REFUSED", "set_permissions"), _broker(configure="^micronova\\\\\\\\.reply.*")
    ),
    "a broker user that may not send": Mistake(
        "default.transport_url", ("ACCESS_REFUSED", "set_permissions"), _broker(write="^micronova.*")
    ),
    "a broker user that may not receive": Mistake(
        "default.transport_url", ("ACCESS_REFUSED", "set_permissions"), _broker(read="^micronova.reply.*")
    ),
    "a queue of another program": Mistake("default.transport_url", ("delete_queue",), _other_queue),
    "no control users": Mistake("default.control_users", ("it is empty",), _set("default", control_users=[])),
    "control users without our own": Mistake(
        "default.control_users", ("does not name", "control-"), _set("default", control_users=["boss"])
    ),
    "a host with the user of the control services": Mistake(
        "default.transport_url", ("is a control user", "host add"), _host(is_control=True), COMPUTE
    ),
    "a host with the user of another host": Mistake(
        "default.host", ("conductors refuse its reports",), _host(host="compute-17"), COMPUTE
    ),
    "a host that may not declare its queue": Mistake(
        "default.transport_url", ("set_permissions",), _host(rights={"configure": "^micronova.reply.*"}), COMPUTE
    ),
    "a database that is not there": Mistake(
        "database.connection",
        ("postgresql://USER",),
        lambda region, tmp_path, sections: _changed(
            sections, "database", connection=f"postgresql://micronova@127.0.0.1:{free_port()}/none"
        ),
    ),
    "a database that does not exist": Mistake(
        "database.connection",
        ("does not exist",),
        lambda region, tmp_path, sections: _changed(
            sections, "database", connection=sections["database"]["connection"].rpartition("/")[0] + "/nowhere"
        ),
    ),
    "a user that the database does not know": Mistake(
        "database.connection",
        ("nobody",),
        lambda region, tmp_path, sections: _changed(
            sections, "database", connection=sections["database"]["connection"].replace("micronova@", "nobody@")
        ),
    ),
    "another kind of database": Mistake(
        "database.connection", ("sqlite:///FILE or postgresql://",), _set("database", connection="mysql://a@b/c")
    ),
    "a database user that may only read": Mistake("database.connection", ("no right INSERT", "GRANT"), _limited_user),
    "a database user that may make no tables": Mistake(
        "database.connection", ("may not make tables", "GRANT CREATE"), _user_of_a_new_database
    ),
    "a schema that is too old": Mistake(
        "database.connection", ("revision 0001", "micronova db upgrade"),
        _database("UPDATE alembic_version SET version_num = '0001'"),
    ),
    "a schema that is too new": Mistake(
        "database.connection", ("revision 9999", "newer micronova"),
        _database(
            "ALTER TABLE alembic_version ADD works_with varchar(32)",
            "UPDATE alembic_version SET version_num = '9999', works_with = '9998'",
        ),
    ),
    "a table that is missing": Mistake(
        "database.connection", ("instances", "missing"), _database("DROP TABLE instances")
    ),
    "a database that takes no writes": Mistake(
        "database.connection", ("takes no writes",),
        _database('ALTER DATABASE "{name}" SET default_transaction_read_only = on'),
    ),
    "more connections than the server has": Mistake(
        "database.pool_size", ("max_connections",), _set("database", pool_size=5000)
    ),
    "an address of another machine": Mistake("api.listen", ("no address 192.0.2.7",), _set("api", listen="192.0.2.7")),
    "a port that another program has": Mistake("api.port", ("another program listens", "free"), _taken_port),
    "metrics without a port": Mistake("api.metrics_listen", ("ADDRESS:PORT",), _set("api", metrics_listen="here")),
    "no authentication on all addresses": Mistake(
        "api.auth_strategy", ("believes every request", "keystone"),
        _set("api", auth_strategy="noauth2", listen="0.0.0.0"),
    ),
    "a proxy that is no address": Mistake(
        "api.trusted_proxies", ("'proxy'", "192.0.2.0/24"), _set("api", trusted_proxies=["proxy"])
    ),
    "a certificate without its key": Mistake("api.tls_key", ("it is empty",), _set("api", tls_certificate="/x.pem")),
    "a certificate that is not there": Mistake(
        "api.tls_certificate", ("cannot be read", "PEM"), _set("api", tls_certificate="/no.pem", tls_key="/no.key")
    ),
    "a certificate that has expired": Mistake("api.tls_certificate", ("expired on", "renew"), _certificate(days=-1)),
    "a certificate for another host": Mistake(
        "api.tls_certificate", ("not for api.example", "subjectAltName"), _certificate(name="other.example")
    ),
    "a key of another certificate": Mistake("api.tls_key", ("does not fit",), _other_key),
    "a file of authorities that is not there": Mistake(
        "ssl.ca_file", ("cannot be read", "PEM"), _set("ssl", ca_file="/no.pem")
    ),
    "a policy file that is not there": Mistake(
        "api.policy_file", ("Cannot read",), _set("api", policy_file="/no.yaml")
    ),
    "a policy rule that does not exist": Mistake(
        "api.policy_file", ("there is no rule servers:creat",), _file("api", "policy_file", '"servers:creat": "!"')
    ),
    "a policy rule with a syntax error": Mistake(
        "api.policy_file", ("cannot be understood", "role:admin"),
        _file("api", "policy_file", f'"{CREATE}": "role:a or"'),
    ),
    "a policy rule that refers to nothing": Mistake(
        "api.policy_file", ("refers to rule:nothing",), _file("api", "policy_file", f'"{CREATE}": "rule:nothing"')
    ),
    "a policy file of placement with a mistake": Mistake(
        "placement.policy_file", ("there is no rule x",), _file("placement", "policy_file", '"x": "!"')
    ),
    "a wrong password of the service user": Mistake(
        "identity.password", ("does not accept the service user micronova", "identity.password"),
        _set("identity", password="x"),
    ),
    "a user that identity does not know": Mistake(
        "identity.password", ("does not accept the service user nobody",), _set("identity", username="nobody")
    ),
    "an identity service that is not there": Mistake(
        "identity.auth_url", ("does not answer", "https://HOST/v3"),
        lambda region, tmp_path, sections: _changed(sections, "identity", auth_url=_nowhere("/identity/v3")),
    ),
    "no identity service": Mistake("identity.auth_url", ("it is empty",), _set("identity", auth_url="")),
    "a region that the catalog does not have": Mistake(
        "glance.endpoint_override", ("no endpoint", "identity.region_name"),
        lambda region, tmp_path, sections: _changed(
            _changed(sections, "glance", endpoint_override=""), "identity", region_name="Mars"
        ),
    ),
    "an image service that is not there": Mistake(
        "glance.endpoint_override", ("does not answer",),
        lambda region, tmp_path, sections: _changed(sections, "glance", endpoint_override=_nowhere("/image")),
    ),
    "a network service at a wrong path": Mistake(
        "neutron.endpoint_override", ("could not be found",),
        lambda region, tmp_path, sections: _changed(
            sections, "neutron", endpoint_override=sections["neutron"]["endpoint_override"] + "/nowhere"
        ),
    ),
    "a volume service that is not there": Mistake(
        "cinder.endpoint_override", ("does not answer",),
        lambda region, tmp_path, sections: _changed(sections, "cinder", endpoint_override=_nowhere("/volume/v3")),
    ),
    "a service with another time": Mistake("", ("clocks of this machine and of the image service", "NTP"), _slow_clock),
    "keys of tokens that are none": Mistake(
        "identity.public_key", ("token-key show",), _set("identity", public_key="abc")
    ),
    "a filter that does not exist": Mistake(
        "filter_scheduler.enabled_filters", ("RamFitler", "RamFilter"),
        _set("filter_scheduler", enabled_filters=["RamFitler"]),
    ),
    "a driver that does not exist": Mistake(
        "compute.compute_driver", ("xen", "fake or libvirt"),
        _set("compute", compute_driver="xen"), ("compute", *CONTROL),
    ),
    "a host without QEMU": Mistake(
        "compute.compute_driver", ("cannot run guests", "qemu-system-x86", "apt-get install"), _bare_host, HOST
    ),
    "a host without programs for networks": Mistake(
        "compute.compute_driver", ("cannot have networks", "nftables", "apt-get install"), _bare_host, HOST
    ),
    "vendor data that is no JSON": Mistake(
        "api.vendordata_providers", ("not valid JSON",), _file("api", "vendordata_jsonfile_path", "{"), ("metadata",)
    ),
    "a version of messages that is none": Mistake(
        "upgrade_levels.compute", ("'juno' is not a version",), _set("upgrade_levels", compute="juno")
    ),
    "a log file in no directory": Mistake(
        "default.log_file", ("no directory /nowhere", "/var/log/micronova"), _set("default", log_file="/nowhere/log")
    ),
    "a log file that is not ours": Mistake("default.log_file", ("may not write",), _closed_log),
    "a directory that is a file": Mistake("default.state_path", ("is a file",), _file("default", "state_path", "")),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
async def test_a_mistake_is_found(region: Region, tmp_path: Path, name: str) -> None:
    mistake = MISTAKES[name]
    sections = await asyncio.to_thread(mistake.plant, region, tmp_path, region.sections)
    file = tmp_path / "micronova.toml"
    file.write_text(toml(sections))
    directory = None if sections["default"].get("state_path") else tmp_path / "state"
    found: list[CheckResult] = []
    await report(mistake.roles, [file], directory, found.append)
    errors = [result for result in found if result.outcome == "error"]
    named = [result for result in errors if result.setting == mistake.setting]
    lines = "\n".join(result.line() for result in errors)
    assert any(all(word in result.line() for word in mistake.says) for result in named), lines
    assert all(result.right or mistake.setting != result.setting for result in named), lines
    assert "secret@" not in lines and "this check failed" not in lines


async def test_a_volume_service_without_qemu_img_is_told_so(
    region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = await _check(region.config, roles=("volume",), directory=tmp_path)
    [lack] = [result for result in found if result.outcome != "ok"]
    assert lack.outcome == "unknown" and "qemu-img is missing" in lack.found and "qemu-utils" in lack.right


async def test_processes_that_may_open_more_connections_than_there_are(region: Region, tmp_path: Path) -> None:
    most = int(region.postgres.sql("SHOW max_connections"))
    for number in range(most // 50):
        _plant_process(region, "api image", f"control-{number}", version("micronova"))  # two pools
    file = tmp_path / "micronova.toml"
    file.write_text(toml(_changed(region.sections, "database", pool_size=25)))
    found = await _check(file, roles=CONTROL, directory=tmp_path)
    [lack] = [result for result in found if result.outcome != "ok"]
    assert lack.setting == "database.pool_size" and "processes that run may open" in lack.found
    assert "max_connections = " in lack.right


async def test_one_broker_of_several_that_is_away_is_no_failure(region: Region, tmp_path: Path) -> None:
    url = region.sections["default"]["transport_url"]
    file = tmp_path / "micronova.toml"
    both = url.replace("/" + region.vhost, f",127.0.0.1:{free_port()}/{region.vhost}")
    file.write_text(toml(_changed(region.sections, "default", transport_url=both)))
    found = await _check(file, roles=CONTROL, directory=tmp_path)
    [away] = [result for result in found if result.outcome != "ok"]
    assert (away.name, away.outcome) == ("broker", "unknown") and "nothing accepts connections" in away.found


async def test_certificates_of_others_that_expire_soon_are_named(region: Region, tmp_path: Path) -> None:
    certificate, key = _make_certificate(tmp_path, name="localhost", days=10)
    (tmp_path / "other").mkdir()
    authority, _ = _make_certificate(tmp_path / "other", name="authority")
    bundle = tmp_path / "bundle.pem"
    bundle.write_text(Path(authority).read_text() + Path(certificate).read_text())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Late)  # what it speaks within TLS does not matter here
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    region.undo.callback(server.server_close)
    region.undo.callback(server.shutdown)
    url = f"amqps://control@localhost:{server.server_address[1]}/?cafile={authority}"
    sections = _changed(region.sections, "default", transport_url=url)
    file = tmp_path / "micronova.toml"
    file.write_text(toml(_changed(sections, "ssl", ca_file=str(bundle))))
    found = {result.name: result for result in await _check(file, roles=CONTROL, directory=tmp_path)}
    shown, verified = found["certificates of broker and database"], found["authorities"]
    for each, setting in ((shown, "default.transport_url"), (verified, "ssl.ca_file")):
        assert (each.setting, each.outcome) == (setting, "unknown") and "expires on" in each.found, each.line()
    assert "certificate 2" in verified.found


async def test_hosts_and_services_are_up_by_the_clock_of_the_database(
    region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = 'uuid, id, host, "binary", disabled, forced_down, last_seen_at, version, created_at'
    now = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
    values = f"'{uuid4()}', 78, 'compute-4', 'nova-compute', false, false, {now}, 1, 0"
    region.postgres.sql(f"INSERT INTO services ({columns}) VALUES ({values})", region.database)
    region.undo.callback(region.postgres.sql, "DELETE FROM services WHERE id = 78", region.database)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 25)  # service_down_time is 20 s

    def run(*arguments: str) -> Any:
        place = ("--config", str(region.config), "--dir", str(tmp_path))
        return CliRunner().invoke(main, [*arguments, *place])

    for command in (("host", "list"), ("service", "list")):
        done = await asyncio.to_thread(run, *command, "--json")
        listed = json.loads(done.output)
        assert listed and {each["state"] for each in listed} == {"up"}, listed
    done = await asyncio.to_thread(run, "host", "show", "compute-4", "--json")
    assert json.loads(done.output)["state"] == "up"
    conductor = next(each["id"] for each in listed if each["binary"] == "nova-conductor")
    done = await asyncio.to_thread(run, "service", "forget", conductor)
    assert done.exit_code != 0 and "stop it first" in f"{done.exception} {done.output}"


async def test_files_of_several_roles_are_compared(region: Region, tmp_path: Path) -> None:
    api, conductor = tmp_path / "api.toml", tmp_path / "conductor.toml"
    api.write_text(toml(region.sections))
    conductor.write_text(toml(_changed(region.sections, "default", secret_key="6d" * 32)))
    found = await _check(api, conductor, roles=CONTROL, directory=tmp_path)
    errors = {result.name: result for result in found if result.outcome == "error"}
    assert errors.keys() <= {"the same everywhere", "secret key"}  # the processes that run have the other key
    differs = errors["the same everywhere"]
    assert differs.setting == "default.secret_key" and "the same value for api, conductor" in differs.right
    assert "6d6d" not in differs.line() and str(conductor) in differs.line()


async def test_a_key_that_does_not_open_what_is_stored(region: Region, tmp_path: Path) -> None:
    """A build with a password waits in the database, sealed with the key of the region."""
    id = str(uuid4())
    sealed = SecretBox(bytes.fromhex(region.sections["default"]["secret_key"])).seal(Secrets(admin_password="x"), id)
    columns = (
        "id, kind, version, instance_uuid, batch_id, epoch, step, payload, secrets, created_at, lease_until, leases, "
        "deadline, context"
    )
    values = f"'{id}', 'none', 99, '{id}', '{id}', 1, 'new', '{{}}', '\\x{sealed.hex()}', 0, 0, 1, 0, ''"
    region.postgres.sql(f"INSERT INTO operations ({columns}) VALUES ({values})", region.database)
    region.undo.callback(region.postgres.sql, f"DELETE FROM operations WHERE id = '{id}'", region.database)
    found = await _check(region.config, roles=CONTROL, directory=tmp_path)
    assert [result.line() for result in found if result.outcome == "error"] == []
    file = tmp_path / "other.toml"
    file.write_text(toml(_changed(region.sections, "default", secret_key="6d" * 32)))
    found = await _check(file, roles=CONTROL, directory=tmp_path)
    wrong = [result for result in found if result.outcome == "error"]
    assert {result.setting for result in wrong} == {"default.secret_key"} and all(result.right for result in wrong)
    said = "\n".join(result.found for result in wrong)
    assert "A secret cannot be read" in said and "runs with another secret key" in said  # the region's own processes


async def test_services_of_another_release_are_named(region: Region, tmp_path: Path) -> None:
    now = f"{time.time() * 1e6 + 60e6:.0f}"
    columns = 'uuid, id, host, "binary", disabled, forced_down, last_seen_at, version, created_at'
    values = f"'{uuid4()}', 77, 'compute-3', 'nova-compute', false, false, {now}, 1, 0"
    region.postgres.sql(f"INSERT INTO services ({columns}) VALUES ({values})", region.database)
    region.undo.callback(region.postgres.sql, "DELETE FROM services WHERE id = 77", region.database)
    found = await _check(region.config, roles=CONTROL, directory=tmp_path)
    [other] = [result for result in found if result.outcome != "ok"]
    assert other.name == "versions of services" and "nova-compute on compute-3" in other.found
    assert other.right == "upgrade them"


def _plant_process(region: Region, roles: str, host: str, release: str, key: str = "") -> None:
    """Record a process that shows signs of life."""
    id, now = str(uuid4()), f"{time.time() * 1e6 + 60e6:.0f}"
    columns = 'id, host, pid, roles, "release", secret_key_id, started_at, seen_at'
    key_column = f"'{key_id(bytes.fromhex(key))}'" if key else "NULL"
    values = f"'{id}', '{host}', 4711, '{roles}', '{release}', {key_column}, {now}, {now}"
    region.postgres.sql(f"INSERT INTO processes ({columns}) VALUES ({values})", region.database)
    region.undo.callback(region.postgres.sql, f"DELETE FROM processes WHERE id = '{id}'", region.database)


async def test_an_api_of_another_release_is_named(region: Region, tmp_path: Path) -> None:
    _plant_process(region, "api", "control-9", "0.1.0")
    found = await _check(region.config, roles=CONTROL, directory=tmp_path)
    [other] = [result for result in found if result.outcome != "ok"]
    assert other.name == "releases of processes" and "api on control-9 (4711) run the release 0.1.0" in other.found


async def test_a_service_without_the_compute_database_is_known(region: Region, tmp_path: Path) -> None:
    """Its release and its secret key are compared as those of others, while it runs."""
    sections = _changed(region.sections, "default", secret_key="6d" * 32, host="images-2")
    file = tmp_path / "other.toml"
    file.write_text(toml(_changed(sections, "identity", auth_url=f"http://127.0.0.1:{free_port()}/identity/v3")))
    process = Process(load(file, {}), ["identity"], StateDirectory(tmp_path / "identity"))
    await process.start()
    try:
        async with asyncio.timeout(60):
            while True:
                found = await _check(region.config, roles=CONTROL, directory=tmp_path)
                if wrong := [result for result in found if result.outcome != "ok"]:
                    break
        [other] = wrong
        assert other.setting == "default.secret_key" and "the process identity on images-2" in other.found
    finally:
        await process.stop()
    found = await _check(region.config, roles=CONTROL, directory=tmp_path)
    assert [result.line() for result in found if result.outcome != "ok"] == []


async def test_a_process_with_another_secret_key_is_named(region: Region, tmp_path: Path) -> None:
    own, release = region.sections["default"]["secret_key"], version("micronova")
    _plant_process(region, "api", "control-8", release, own)
    found = await _check(region.config, roles=CONTROL, directory=tmp_path)
    assert [result.line() for result in found if result.outcome != "ok"] == []
    _plant_process(region, "api", "control-9", release, "6d" * 32)
    found = await _check(region.config, roles=CONTROL, directory=tmp_path)
    [other] = [result for result in found if result.outcome != "ok"]
    assert other.outcome == "error" and other.setting == "default.secret_key" and "api on control-9" in other.found
    # While the key is changed it is one of the others, and a restart is all that is left to do.
    file = tmp_path / "other.toml"
    file.write_text(toml(_changed(region.sections, "default", other_secret_keys="6d" * 32)))
    found = await _check(file, roles=CONTROL, directory=tmp_path)
    [other] = [result for result in found if result.outcome != "ok"]
    assert other.outcome == "unknown" and "restart it" in other.right and "6d6d" not in other.line()


async def test_conductors_with_one_name_are_named(region: Region, tmp_path: Path) -> None:
    for _ in range(2):
        _plant_process(region, "conductor", "control-9", version("micronova"))
        _plant_process(region, "api", "control-9", version("micronova"))  # workers of an API may share a name
    found = await _check(region.config, roles=CONTROL, directory=tmp_path)
    [other] = [result for result in found if result.outcome != "ok"]
    assert other.setting == "default.host" and "2 processes with the role conductor are called control-9" in other.found
