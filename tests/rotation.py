"""Change the keys and passwords of a region under load: `python -m tests.rotation`.

docs/operate.md says how: two are valid at a time, and one process after the other is restarted. While clients log in,
create servers with passwords on a network, show and delete them, these are changed: the secret key, the keys of tickets
of images and of hosts, the key of tokens, the user of the broker, the passwords of hosts, the role of the database, and
the service user. No request may fail, no server may end in ERROR, and the audit finds nothing. What was valid before is
gone at the end.

A new process of an HTTP role is started before the old one is stopped, behind a proxy of this program.
"""

import contextlib
import http.client
import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url

from tests.cluster import Cluster
from tests.documented import command_with
from tests.services.postgres import OWNER, Postgres
from tests.services.process import free_port
from tests.services.rabbitmq import RabbitMQ
from tests.upgrade import LOAD_BEFORE, Clients, Region, wait_for_clean_audit

SECOND = "micronova_2"
SERVICES = ("identity", "image", "network")
PATHS = {"identity": "/identity/v3", "image": "/image", "network": "/network", "api": "/compute/v2.1"}
HOSTS = ("compute1", "compute2")


class Front:
    """A proxy on a port of its own, whose connections lead to the port of the process that is in use."""

    def __init__(self) -> None:
        self.target = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._lead, args=(client,), daemon=True).start()

    def _lead(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            client.close()
            return
        back = threading.Thread(target=_copy, args=(server, client), daemon=True)
        back.start()
        _copy(client, server)
        back.join()
        client.close()
        server.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class WholeRegion(Region):
    """A region with identity, image and network services, where each host has a broker user of its own."""

    def __init__(self, directory: Path, database: str, rabbitmq: RabbitMQ, user: str) -> None:
        self.fronts = {role: Front() for role in PATHS}
        self.rabbitmq = rabbitmq
        self.token = ""
        url = {role: f"http://127.0.0.1:{self.fronts[role].port}{path}" for role, path in PATHS.items()}
        Cluster.__init__(
            self, directory, database, rabbitmq.url,
            default={
                "service_down_time": 30.0, "control_users": [user], "secret_key": secrets.token_hex(32),
                "other_secret_keys": "",
            },
            api={"auth_strategy": "keystone"},
            conductor={"require_host_users": True},
            identity={"auth_url": url["identity"], "username": "micronova", "password": "first"},
            glance={"endpoint_override": url["image"], "ticket_key": secrets.token_hex(32), "other_ticket_keys": ""},
            neutron={"endpoint_override": url["network"], "ticket_key": secrets.token_hex(32), "other_ticket_keys": ""},
            nova={"endpoint_override": url["api"]},
            placement={"endpoint_override": url["api"].replace("/compute/v2.1", "/placement")},
        )  # fmt: skip
        self.port = self.fronts["api"].port
        self.names = {name: name[:-1] for name in ("conductor1", "conductor2", "scheduler1", "scheduler2")}
        for name, role in self.names.items():
            self.add(name, role, MICRONOVA__DEFAULT__HOST=name)
        self._running: dict[str, str] = {}
        self._numbers = dict.fromkeys(PATHS, 0)

    def micronova(self, *arguments: str | Path) -> str:
        """Run a command of an operator."""
        return subprocess.run(
            [sys.executable, "-m", "micronova.cli.main", *arguments], check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def begin(self) -> None:
        """Start everything, and log in."""
        self.micronova("db", "upgrade", "--config", self.config, "--dir", self.directory / "tool")
        for role in PATHS:
            self.renew(role)
        self.start(*self.names)
        for name in HOSTS:
            self.add_host(name)
            self.start(name)
        self.token = self.log_in()
        self.wait_ready(hosts=len(HOSTS))

    def renew(self, role: str) -> None:
        """Start a new process of an HTTP role, let clients use it, and end the old one."""
        self._numbers[role] += 1
        name, port = f"{role}-{self._numbers[role]}", free_port()
        if self._numbers[role] > 1:  # the same keys and files
            (self.directory / name).symlink_to(self.directory / f"{role}-1")
        self.add_service(name, role, port, MICRONOVA__DEFAULT__HOST=name)
        self.start(name)
        self.wait_until(lambda: _get(port, "/healthcheck/ready")[0] == 200)
        self.fronts[role].target = port
        if old := self._running.get(role):
            time.sleep(1.0)  # requests that the old one has in hand end
            self.end(old)
            self.remove(old)
        self._running[role] = name

    def add_host(self, name: str) -> None:
        """Give a host settings with a new password, as an operator does."""
        file = self.directory / f"{name}.toml"
        file.unlink(missing_ok=True)
        self.rabbitmq.do(
            *self.micronova(
                "host", "add", name, "--driver", "fake", "--settings", file, "--config", self.config,
                "--dir", self.directory / "tool",
            ).splitlines()
        )  # fmt: skip
        own = "[default]\nservice_down_time = 30.0\nresume_guests_state_on_host_boot = true\n"
        file.write_text(file.read_text().replace("[default]\n", own))
        self.add(name, "compute", file)

    def log_in(self) -> str:
        """Return a token of the administrator."""
        keys = json.loads((self.directory / "identity-1" / "keys.json").read_text())
        domain = {"id": "default"}
        user = {"name": "admin", "domain": domain, "password": keys["admin_password"]}
        identity = {"methods": ["password"], "password": {"user": user}}
        body = {"auth": {"identity": identity, "scope": {"project": {"name": "admin", "domain": domain}}}}
        connection = http.client.HTTPConnection("127.0.0.1", self.fronts["identity"].port, timeout=60)
        with contextlib.closing(connection):
            sent = {"Content-Type": "application/json"}
            connection.request("POST", "/identity/v3/auth/tokens", json.dumps(body), sent)
            answer = connection.getresponse()
            said = answer.read()
            assert answer.status == 201, said
            return str(answer.headers["X-Subject-Token"])

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Send a request to the compute API, as the administrator."""
        return super().request(method, path, body, **{"token": self.token, **options})

    def ask(self, role: str, path: str, method: str = "GET", body: Any = None) -> Any:
        """Ask another service."""
        status, answer = _get(self.fronts[role].port, path, self.token, method, body)
        assert status == 200, answer
        return answer

    def change(self, **sections: dict[str, Any]) -> None:
        """Change settings in the file that all control processes share."""
        for section, values in sections.items():
            head, name, rest = self.config.read_text().partition(f"[{section}]\n")
            own, end, others = rest.partition("\n[")
            lines = own.splitlines()
            for key, value in values.items():
                found = [number for number, line in enumerate(lines) if line.startswith(f"{key} = ")]
                assert len(found) == 1, (section, key)
                lines[found[0]] = f"{key} = {json.dumps(value)}"
            self.config.write_text(head + name + "\n".join(lines) + end + others)

    def restart(self) -> None:
        """Restart one process after the other; hosts get new passwords."""
        for role in SERVICES:
            print(f"  {role}", flush=True)
            self.renew(role)
        for name in self.names:
            print(f"  {name}", flush=True)
            self.replace(name)
        print("  api", flush=True)
        self.renew("api")
        for name in HOSTS:
            print(f"  {name}", flush=True)
            self.add_host(name)
            self.replace(name)
            time.sleep(LOAD_BEFORE)


def _get(port: int, path: str, token: str = "", method: str = "GET", body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        headers = {"X-Auth-Token": token, "Content-Type": "application/json", "Accept": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        data = answer.read()
        return answer.status, json.loads(data) if data else None


class People(Clients):
    """Clients that also log in."""

    def __init__(self, region: WholeRegion, **server: Any) -> None:
        super().__init__(region, keep=25, **server)
        self._region = region

    def before_each(self) -> None:
        """Log in before each server."""
        self.requests += 1
        try:
            self._region.log_in()
        except (OSError, AssertionError, http.client.HTTPException) as error:
            self.failed.append(f"log in: {error}")


def run(directory: Path) -> None:
    """Do all of it; raise AssertionError if a request fails."""
    with contextlib.ExitStack() as stack:
        postgres = Postgres.start(directory / "postgres")
        stack.callback(postgres.stop)
        rabbitmq = RabbitMQ.start(directory / "rabbitmq")
        stack.callback(rabbitmq.stop)
        database = postgres.create_database("rotation")
        user = str(make_url(rabbitmq.url).username)
        region = WholeRegion(directory / "cloud", database, rabbitmq, user)
        stack.callback(region.stop)
        region.begin()
        first_token = region.token
        [image, *_] = region.ask("image", "/image/v2/images")["images"]
        [network] = region.ask("network", "/network/v2.0/networks?name=private")["networks"]
        before = region.config.read_text()
        with People(region, imageRef=image["id"], networks=[{"uuid": network["id"]}]) as clients:
            time.sleep(LOAD_BEFORE)
            rotate(region, postgres, database, user)
        assert not clients.failed, f"{len(clients.failed)} requests failed: {clients.failed[:10]}"
        users = set(postgres.sql("SELECT DISTINCT usename FROM pg_stat_activity WHERE datname = 'rotation'").split())
        assert users == {SECOND}, users
        now = region.config.read_text()
        assert not [each for each in _keys(before) if each in now], "an old key is left in the settings"
        status, _ = region.request("GET", "/servers", token=first_token)
        assert status == 200, "the rotation of the key of tokens has logged somebody out"
        wait_for_clean_audit(region)
        print(f"{clients.requests} requests, none failed; {len(clients.kept)} servers are left, the audit is clean")


def rotate(region: WholeRegion, postgres: Postgres, database: str, user: str) -> None:
    """Make what is new valid, use it, and take away what is old."""
    settings = _keys(region.config.read_text())
    old_secret, old_image, old_network = settings[:3]
    new_secret, new_image, new_network = (secrets.token_hex(32) for _ in range(3))
    print("both are valid", flush=True)
    bus = region.rabbitmq.add_user(SECOND, "second")
    postgres.sql(command_with("operate.md", f"CREATE ROLE {SECOND}").replace("NEW", "second"))
    postgres.sql(command_with("operate.md", f"ALTER ROLE {SECOND}"))
    region.micronova("token-key", "rotate", "--dir", region.directory / "identity-1", "--after", "60")
    region.change(
        default={"other_secret_keys": new_secret, "control_users": [user, SECOND]},
        glance={"other_ticket_keys": new_image},
        neutron={"other_ticket_keys": new_network},
    )
    region.restart()
    print("the new ones are used", flush=True)
    second = make_url(database).set(username=SECOND, password="second").render_as_string(hide_password=False)
    region.change(
        default={"secret_key": new_secret, "other_secret_keys": old_secret, "transport_url": bus},
        glance={"ticket_key": new_image, "other_ticket_keys": old_image},
        neutron={"ticket_key": new_network, "other_ticket_keys": old_network},
        database={"connection": second},
        identity={"username": SECOND, "password": "second"},
    )
    region.restart()
    print("the old ones are gone", flush=True)
    region.micronova("key", "rotate", "--config", region.config, "--dir", region.directory / "tool")
    region.change(
        default={"other_secret_keys": "", "control_users": [SECOND]},
        glance={"other_ticket_keys": ""},
        neutron={"other_ticket_keys": ""},
    )
    region.rabbitmq.ctl("delete_user", user)
    [first] = region.ask("identity", "/identity/v3/users?name=micronova")["users"]
    region.ask("identity", f"/identity/v3/users/{first['id']}", "PATCH", {"user": {"enabled": False}})
    region.restart()
    postgres.sql(command_with("operate.md", f"ALTER ROLE {OWNER} PASSWORD NULL"))


def _keys(settings: str) -> list[str]:
    """Return the keys of settings: the secret key, that of images, that of hosts."""
    return [line.split('"')[1] for line in settings.splitlines() if line.startswith(("secret_key", "ticket_key"))]


def main() -> None:
    """Run it in a new directory, and remove that if all is well."""
    directory = Path(tempfile.mkdtemp(prefix="micronova-rotation-"))
    directory.chmod(0o755)
    began = time.monotonic()
    try:
        run(directory)
    except AssertionError as error:
        sys.exit(f"{error}; its files are in {directory}")
    shutil.rmtree(directory, ignore_errors=True)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
