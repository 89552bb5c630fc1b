"""The `micronova` command as a user calls it: clouds that start, stop, break and come back; and what it tells."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import ssl
import stat
import subprocess
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import micronova as micronova_package
from micronova.cli.own_command import own_command
from micronova.cli.ssh import _prepare
from micronova.cli.user_session import open_session
from micronova.objects.errors import MicronovaError
from micronova.testimage import builder
from tests.command import UpCloud, micronova, ok, refused
from tests.services.process import free_port

pytestmark = pytest.mark.timeout(180)

DOWN_TIME = 3.0
# Quick to notice, and servers whose name begins with "slow" take their time.
SETTINGS = f"""
[default]
report_interval = 0.5
service_down_time = {DOWN_TIME}
[conductor]
lease = 2.0
sweep_interval = 0.3
[compute]
shutdown_grace = 0.2
[quota]
instances = -1
cores = -1
ram = -1
[[fake.rules]]
operation = "spawn"
kind = "delay"
name = "^slow"
delay = 1.5
"""


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCloud]:
    """A cloud that the tests of this module share, stop and start again."""
    made = UpCloud(tmp_path_factory.mktemp("up") / "cloud", "--hosts", "3", settings=SETTINGS)
    yield made
    _ensure_down(made)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[UpCloud]:
    """A second cloud, whose hosts are in its settings."""
    made = UpCloud(tmp_path / "other", settings=f"{SETTINGS}[fake]\nhosts = 11\n")
    yield made
    _ensure_down(made)


def _ensure_down(cloud: UpCloud) -> None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
        os.kill(cloud.pid, signal.SIGKILL)


def _ensure_up(cloud: UpCloud) -> str:
    """Start the cloud unless it runs; return a token."""
    if micronova("status", "--dir", cloud.directory, "--json").returncode:
        cloud.up()
    return cloud.token()


def _until(probe: Callable[[], Any], what: str, seconds: float = 40.0) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        found = probe()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.1)  # another process: nobody tells us


def _create(cloud: UpCloud, token: str, name: str, count: int = 1) -> None:
    [image] = cloud.request("GET", "/image/v2/images?name=test-image", headers={"X-Auth-Token": token})[1]["images"]
    server = {"name": name, "imageRef": image["id"], "flavorRef": "1", "networks": "auto", "min_count": count}
    cloud.compute("POST", "/servers", {"server": server}, token=token, status=202)


def _servers(cloud: UpCloud, token: str, name: str) -> list[dict[str, Any]]:
    servers: list[dict[str, Any]] = cloud.compute("GET", f"/servers/detail?name=^{name}", token=token)["servers"]
    return servers


def _delete(cloud: UpCloud, token: str, name: str) -> None:
    """Delete servers that other tests of the same cloud should not find."""
    for server in _servers(cloud, token, name):
        cloud.compute("DELETE", f"/servers/{server['id']}", token=token, status=204)
    _until(lambda: not _servers(cloud, token, name), "the deletes")


def _all_active(cloud: UpCloud, token: str, name: str, count: int) -> Callable[[], bool]:
    def probe() -> bool:
        servers = _servers(cloud, token, name)
        assert not [server["fault"] for server in servers if server["status"] == "ERROR"]
        return len(servers) == count and all(
            server["status"] == "ACTIVE" and server["OS-EXT-STS:task_state"] is None for server in servers
        )

    return probe


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- life ----------------------------------------------------------------------------------------------------------


def test_the_first_start_makes_everything(cloud: UpCloud) -> None:
    said = cloud.up()
    assert f"http://127.0.0.1:{cloud.port}" in said
    assert f"export OS_CLIENT_CONFIG_FILE={cloud.directory / 'clouds.yaml'} OS_CLOUD=micronova" in said
    assert f"export MICRONOVA_DIR={cloud.directory}" in said and "fake driver" in said
    assert json.loads(ok("status", "--json", env={"MICRONOVA_DIR": str(cloud.directory)}))["pid"] == cloud.pid

    token = cloud.token()
    flavors = cloud.compute("GET", "/flavors", token=token)["flavors"]
    assert {flavor["name"] for flavor in flavors} == {
        f"m1.{size}" for size in ("tiny", "small", "medium", "large", "xlarge")
    }
    services = cloud.compute("GET", "/os-services", token=token)["services"]
    assert {service["host"] for service in services if service["binary"] == "nova-compute"} == {
        "fake-1", "fake-2", "fake-3",
    }  # fmt: skip
    headers = {"X-Auth-Token": token}
    roles = cloud.request("GET", "/identity/v3/roles", headers=headers)[1]["roles"]
    assert {"admin", "manager", "member", "reader", "service"} <= {role["name"] for role in roles}
    projects = cloud.request("GET", "/identity/v3/projects", headers=headers)[1]["projects"]
    assert {"admin", "demo", "service"} <= {project["name"] for project in projects}
    networks = cloud.request("GET", "/network/v2.0/networks", headers=headers)[1]["networks"]
    assert "private" in {network["name"] for network in networks}
    images = cloud.request("GET", "/image/v2/images", headers=headers)[1]["images"]
    assert [(image["name"], image["status"], image["visibility"]) for image in images] == [
        ("test-image", "active", "public")
    ]
    demo = cloud.token("demo", "demo")
    assert cloud.request("GET", "/identity/v3/users", headers={"X-Auth-Token": demo})[0] == 403


def test_secrets_are_the_owners_alone(cloud: UpCloud) -> None:
    _ensure_up(cloud)
    assert _mode(cloud.directory) == 0o700
    for name in ("clouds.yaml", "keys.json", "control.sock"):
        assert _mode(cloud.directory / name) == 0o600, name
    keys = json.loads((cloud.directory / "keys.json").read_text())
    passwords = {keys["admin_password"], keys["demo_password"], keys["service_password"]}
    assert len(passwords) == 3 and all(re.fullmatch("[A-Za-z]{20,}", password) for password in passwords)
    clouds = (cloud.directory / "clouds.yaml").read_text()
    assert keys["admin_password"] in clouds and keys["demo_password"] in clouds
    assert keys["service_password"] not in clouds and keys["admin_password"] not in cloud.log


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="it is about what root's cloud is not: started by root")


def _status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: words.split() for name, _, words in (line.partition(":") for line in lines)}


@AS_ROOT
def test_what_answers_http_is_not_root_and_has_no_powers(cloud: UpCloud) -> None:
    _ensure_up(cloud)
    status = _status(cloud.pid)
    owner = cloud.directory.stat().st_uid
    assert owner != 0 and status["Uid"] == [str(owner)] * 4 and "0" not in status["Gid"] + status["Groups"]
    assert all(int(status[name][0], 16) == 0 for name in ("CapPrm", "CapEff", "CapInh"))
    # Pytest's directories are closed to that user. They still are; it has a view of its own.
    assert _mode(cloud.directory.parent.parent) == 0o700
    assert Path(f"/proc/{cloud.pid}/ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink()


@AS_ROOT
def test_clouds_yaml_is_readable_by_who_typed_sudo_and_nobody_else() -> None:
    parent = Path(tempfile.mkdtemp(prefix="mn-sudo-"))
    parent.chmod(0o755)
    made = UpCloud(parent / "cloud", environment={"SUDO_UID": "12345", "SUDO_GID": "12345"})

    def reads(user: int, name: str) -> bool:
        command = ["cat", str(made.directory / name)]
        return subprocess.run(command, user=user, group=user, extra_groups=[], capture_output=True).returncode == 0

    try:
        for _ in range(2):  # also when the directory is there already
            made.up()
            assert reads(12345, "clouds.yaml") and not reads(12346, "clouds.yaml")
            for name in ("keys.json", "compute.sqlite", "micronova.log", "images"):
                assert not reads(12345, name), name
            made.down()
    finally:
        _ensure_down(made)
        shutil.rmtree(parent)


PERSON = 12345


def _as_person(*arguments: str | Path, home: Path, **env: str) -> Any:
    """Run the command as a person who is not root; skip the test if this person cannot read our code."""
    inside = ["setpriv", f"--reuid={PERSON}", f"--regid={PERSON}", "--clear-groups"]
    if subprocess.run([*inside, "test", "-r", micronova_package.__file__], stdin=subprocess.DEVNULL).returncode:
        pytest.skip("other users cannot read this clone")
    return micronova(
        *arguments, env={"HOME": str(home), "XDG_STATE_HOME": "", "XDG_CACHE_HOME": "", **env}, inside=inside
    )


def _one_line(done: Any) -> str:
    assert done.returncode != 0 and "Traceback" not in done.stderr, done
    assert len(done.stderr.splitlines()) == 1 or done.stderr.startswith("Usage: "), done
    return str(done.stderr.splitlines()[-1])


@pytest.fixture
def public_place() -> Iterator[Path]:
    """A directory that everybody can pass through; pytest's own are closed to others."""
    parent = Path(tempfile.mkdtemp(prefix="mn-person-"))
    parent.chmod(0o755)
    yield parent
    shutil.rmtree(parent)


@AS_ROOT
def test_who_typed_sudo_is_told_when_sudo_is_needed(public_place: Path) -> None:
    made = UpCloud(public_place / "cloud", environment={"SUDO_UID": str(PERSON), "SUDO_GID": str(PERSON)})
    made.up()

    def person(*arguments: str) -> str:
        """Run a command with the variables that `up` prints."""
        variables = {"OS_CLIENT_CONFIG_FILE": str(made.directory / "clouds.yaml"), "OS_CLOUD": "micronova-demo"}
        done = _as_person(*arguments, home=public_place, MICRONOVA_DIR=str(made.directory), **variables)
        return _one_line(done)

    try:
        # It logs in as a member, for which clouds.yaml suffices.
        assert "simulated" in person("ssh", "nothing")
        for command in (
            "status",
            "audit",
            "timeline x",
            "explain x",
            "down",
            "connect 203.0.113.3 22",
            "up",
            "image build-test",
        ):
            assert "use sudo" in person(*command.split()), command
        for command in ("host list", "db upgrade", "db purge --before 2020-01-01", "token-key show"):
            assert "sudo" in person(*command.split()), command
    finally:
        made.down()


@AS_ROOT
def test_what_a_person_may_not_write_is_one_line(public_place: Path) -> None:
    closed = public_place / "closed"
    closed.mkdir(mode=0o700)
    cache = public_place / "cache"
    cache.mkdir()
    os.chown(cache, PERSON, PERSON)
    (cache / f"testimage-{builder._digest()}.qcow2").write_bytes(b"built before")
    for command in (
        ("up", "--driver", "fake", "--port", "0", "--dir", closed / "cloud"),
        ("up", "--driver", "fake", "--port", "0", "--dir", closed / "cloud", "--detach"),
        ("up", "--driver", "fake", "--port", "0", "--dir", public_place / "new"),
        ("run", "api", "identity", "--dir", closed / "cloud"),
        ("image", "build-test", "--output", closed / "x.img", "--cache", cache),
        ("image", "build-test", "--output", cache / "x.img", "--cache", closed),
        ("host", "list", "--dir", closed / "cloud"),
        ("db", "upgrade", "--dir", closed / "cloud"),
        ("token-key", "rotate", "--dir", closed / "cloud"),
        ("down", "--dir", closed / "cloud"),
        ("status", "--dir", closed / "cloud"),
        ("config", "--config", closed / "settings.toml"),
        ("policy", "check", "--file", closed / "policy.yaml"),
    ):
        said = _one_line(_as_person(*command, home=public_place))
        assert str(public_place) in said, (command, said)


@AS_ROOT
def test_a_directory_that_is_deleted_is_forgotten(tmp_path: Path) -> None:
    made = UpCloud(tmp_path / "cloud")
    for _ in range(2):
        made.up()
        assert made.down().strip() == "stopped"
        shutil.rmtree(made.directory)


def test_ssh_changes_nothing_if_guests_are_simulated(cloud: UpCloud, tmp_path: Path) -> None:
    _ensure_up(cloud)
    demo = cloud.token("demo", "demo")
    headers = {"X-Auth-Token": demo}

    def there() -> list[Any]:
        paths = ("/network/v2.0/floatingips", "/network/v2.0/security-group-rules", "/compute/v2.1/os-keypairs")
        return [cloud.request("GET", path, headers=headers)[1] for path in paths]

    _create(cloud, demo, "simulated")
    _until(_all_active(cloud, demo, "simulated", 1), "the server")
    before = there()
    env = {"HOME": str(tmp_path), "OS_CLIENT_CONFIG_FILE": "", "OS_CLOUD": ""}
    said = refused("ssh", "simulated", "--yes", "--dir", cloud.directory, env=env)
    assert "simulated: SSH is not possible" in said
    assert there() == before and list(tmp_path.iterdir()) == []
    _delete(cloud, demo, "simulated")


async def test_a_server_that_has_no_key_gets_none(
    cloud: UpCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ensure_up(cloud)
    demo = cloud.token("demo", "demo")
    _create(cloud, demo, "keyless")
    _until(_all_active(cloud, demo, "keyless", 1), "the server")
    monkeypatch.setenv("HOME", str(tmp_path))
    session = open_session(cloud.directory / "clouds.yaml", "micronova-demo")
    with pytest.raises(MicronovaError, match="created without a key pair"):
        await _prepare(session, "keyless", None, yes=True)
    assert cloud.compute("GET", "/os-keypairs", token=demo)["keypairs"] == [] and list(tmp_path.iterdir()) == []
    _delete(cloud, demo, "keyless")


@AS_ROOT
def test_every_start_closes_the_directory_to_others(tmp_path: Path) -> None:
    made = UpCloud(tmp_path / "cloud")
    try:
        for _ in range(2):
            made.up()
            assert _mode(made.directory) == 0o700
            databases = list(made.directory.glob("*.sqlite*"))
            assert databases and {_mode(file) for file in databases} == {0o600}
            made.down()
            made.directory.chmod(0o711)
    finally:
        _ensure_down(made)


@AS_ROOT
def test_root_follows_no_link_of_the_service_user(tmp_path: Path) -> None:
    made = UpCloud(tmp_path / "cloud")
    made.up()
    made.down()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (made.directory / "micronova.log").unlink()
    (made.directory / "micronova.log").symlink_to(victim)
    assert "micronova.log" in refused("up", "--driver", "fake", "--dir", made.directory, "--port", "0", "--detach")
    (made.directory / "micronova.log").unlink()
    (made.directory / ".keys.json.new").symlink_to(victim)
    (made.directory / "keys.json").unlink()
    micronova("up", "--driver", "fake", "--dir", made.directory, "--port", "0", "--detach")
    micronova("down", "--dir", made.directory)
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("first", [True, False])
def test_the_log_of_a_detached_cloud_is_limited(tmp_path: Path, first: bool) -> None:
    made = UpCloud(tmp_path / "cloud", settings="[default]\nlog_file_max_size = 50000\n")
    log = made.directory / "micronova.log"
    try:
        made.up()
        if not first:  # root makes the log again, in a directory that is the service user's by now
            made.down()
            log.unlink()
            made.up()
        assert log.stat().st_uid == made.directory.stat().st_uid
        with log.open("a") as of_an_agent:
            of_an_agent.write("x\n" * 50_000)
        _until(lambda: log.stat().st_size <= 50_000, "the log to be cut")
        assert made.token() and "log_file_max_size" not in made.log
    finally:
        made.down()


@AS_ROOT
@pytest.mark.parametrize(
    "command", [("db", "upgrade"), ("db", "purge", "--before", "2020-01-01"), ("check",), ("host", "list")]
)
def test_root_opens_no_database_that_the_service_user_links_to(tmp_path: Path, command: tuple[str, ...]) -> None:
    made = UpCloud(tmp_path / "cloud")
    made.up()
    made.down()
    # The database of another cloud, which root alone can open.
    victim = tmp_path / "closed" / "compute.sqlite"
    victim.parent.mkdir(mode=0o700)
    own = made.directory / "compute.sqlite"
    shutil.copy(own, victim)
    assert micronova(*command, "--dir", made.directory).returncode == 0
    files = [each for each in made.directory.iterdir() if each.is_file()]
    assert {each.stat().st_uid for each in files} == {made.directory.stat().st_uid} != {0}
    own.unlink()
    own.symlink_to(victim)
    before = sorted(victim.parent.iterdir()), victim.read_bytes()
    done = micronova(*command, "--dir", made.directory)
    assert done.returncode != 0 and "compute" in done.stdout + done.stderr
    assert (sorted(victim.parent.iterdir()), victim.read_bytes()) == before


@AS_ROOT
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "cloud"
    place.mkdir()
    os.chown(place, 12345, 12345)
    said = refused("up", "--driver", "fake", "--dir", place, "--port", str(free_port()))
    assert str(place) in said and "belongs to another user" in said
    assert place.stat().st_uid == 12345 and not (place / "keys.json").exists()


def test_the_background_process_runs_nothing_of_the_current_directory(tmp_path: Path) -> None:
    made = UpCloud(tmp_path / "cloud")
    decoy = tmp_path / "decoy" / "click.py"
    decoy.parent.mkdir()
    decoy.write_text("raise SystemExit('decoy')\n")
    command = own_command("up", "--driver", "fake", "--dir", str(made.directory), "--port", "0", "--detach")
    done = subprocess.run(command, cwd=decoy.parent, capture_output=True, text=True, timeout=60)
    try:
        assert done.returncode == 0, done.stderr
    finally:
        micronova("down", "--dir", made.directory)


def test_with_a_certificate_the_cloud_says_https(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    made = [*command.split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    key.chmod(0o644)  # the cloud reads it as its own user
    tmp_path.chmod(0o755)
    settings = f'[api]\ntls_certificate = "{certificate}"\ntls_key = "{key}"\n[default]\nuser = "root"\n'
    cloud = UpCloud(tmp_path / "cloud", settings=settings)
    url = f"https://127.0.0.1:{cloud.port}"
    try:
        assert f"Micronova is up at {url} " in cloud.up()
        assert f"auth_url: {url}/identity/v3\n" in (cloud.directory / "clouds.yaml").read_text()
        context = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(f"{url}/identity/v3", context=context) as answer:
            assert json.loads(answer.read())["version"]["links"][0]["href"].startswith(url)
    finally:
        cloud.down()


def test_where_guests_cannot_be_real_it_says_what_to_do(tmp_path: Path) -> None:
    place = ("--dir", tmp_path / "cloud", "--port", str(free_port()))
    env = {"PATH": f"{tmp_path}:{os.path.dirname(shutil.which('useradd') or '/usr/sbin/useradd')}"}
    wanted = "apt-get install --no-install-recommends" if os.geteuid() == 0 else "run as root"
    assert wanted in refused("up", "--driver", "libvirt", *place, env=env)
    said = ok("up", *place, "--detach", env=env)
    try:
        assert "fake driver" in said and "Real guests are not possible here" in said and wanted in said
    finally:
        ok("down", "--dir", tmp_path / "cloud")


@AS_ROOT
def test_root_can_be_told_to_stay_root(tmp_path: Path) -> None:
    made = UpCloud(tmp_path / "cloud", settings='[default]\nuser = "root"\n')
    made.up()
    try:
        assert _status(made.pid)["Uid"] == ["0"] * 4
    finally:
        made.down()


def test_it_runs_once_per_directory(cloud: UpCloud) -> None:
    _ensure_up(cloud)
    said = refused("up", "--driver", "fake", "--dir", cloud.directory, "--port", str(free_port()))
    assert "runs in" in said and "micronova down" in said
    assert cloud.token()


def _explain(cloud: UpCloud, server: str) -> None:
    """What the command tells of a server, of a request, and of the fleet."""
    place = ("--dir", str(cloud.directory))
    told = ok("explain", "told", *place)
    assert "decided among 3 hosts in" in told and "chosen: fake-" in told
    assert all(len(line) <= 80 for line in told.splitlines())
    [request] = json.loads(ok("explain", server, "--json", *place))["requests"]
    assert [step["remaining"] for step in request["decisions"][0]["filters"]] == [3] * 14
    assert "no-such" in refused("explain", "no-such", *place)
    wanted = ("explain", "--dry-run", "--flavor", "m1.tiny", "--image", "test-image", "--project", "demo", *place)
    assert "1 server of flavor m1.tiny would go to" in ok(*wanted)
    assert len(json.loads(ok(*wanted, "--count", "3", "--json"))["selections"]) == 3
    drawn = cloud.directory / "dry-run.svg"
    done = micronova(*wanted[:3], "m1.xlarge", "--count", "1000", "--heat-map", drawn, *place)
    assert done.returncode == 1 and "There is room for " in done.stdout and "removed by" in drawn.read_text()
    for option, value in (("--image", "no-such"), ("--project", "no-such"), ("--flavor", "no-such")):
        assert "no-such" in refused(*wanted, option, value)
    ok("explain", "--heat-map", drawn, "--by", "memory", *place)
    assert drawn.read_text().count("<path d=") >= 3
    assert "there is no directory" in refused("explain", "--heat-map", cloud.directory / "none" / "x.svg", *place)


def test_what_is_told_of_a_running_cloud(cloud: UpCloud) -> None:
    token = _ensure_up(cloud)
    _create(cloud, token, "told")
    _until(_all_active(cloud, token, "told", 1), "the server")
    found = json.loads(ok("status", "--dir", cloud.directory, "--json"))
    assert found["servers"] == {"ACTIVE": 1} and found["pid"] == cloud.pid
    assert found["operations"] == {"open": 0, "without_valid_lease": 0} and found["bus"]["connected"] is True
    assert {row["state"] for row in found["services"]} == {"up"}
    shown = ok("status", "--dir", cloud.directory)
    assert "nova-compute" in shown and "1 ACTIVE" in shown

    assert ok("audit", "--dir", cloud.directory).strip() == "nothing is wrong"
    assert json.loads(ok("audit", "--dir", cloud.directory, "--json")) == []
    [server] = _servers(cloud, token, "told")
    for name in ("told", server["id"]):
        drawn = ok("timeline", name, "--dir", cloud.directory)
        assert "told" in drawn and "create" in drawn
    assert "no-such" in refused("timeline", "no-such", "--dir", cloud.directory)
    _explain(cloud, server["id"])
    _create(cloud, token, "twice", 1)
    _create(cloud, token, "twice", 1)
    assert "2 servers are called twice" in refused("timeline", "twice", "--dir", cloud.directory)
    _until(_all_active(cloud, token, "twice", 2), "the servers")
    _delete(cloud, token, "twice")
    assert "2 deleted servers were called twice" in refused("timeline", "twice", "--dir", cloud.directory)

    assert [line.split()[:3] for line in ok("host", "list", "--dir", cloud.directory).splitlines()[1:]] == [
        [f"fake-{number}", "up", "enabled"] for number in (1, 2, 3)
    ]
    ok("host", "disable", "fake-3", "--reason", "spring cleaning", "--dir", cloud.directory)
    listed = ok("host", "list", "--dir", cloud.directory)
    assert "fake-3" in listed and "spring cleaning" in listed
    services = cloud.compute("GET", "/os-services?host=fake-3", token=token)["services"]
    assert [(row["status"], row["disabled_reason"]) for row in services] == [("disabled", "spring cleaning")]
    assert "micronova host enable fake-2" in ok("host", "drain", "fake-2", "--dir", cloud.directory)
    for host in ("fake-2", "fake-3"):
        ok("host", "enable", host, "--dir", cloud.directory)
    services = cloud.compute("GET", "/os-services?host=fake-3", token=token)["services"]
    assert [(row["status"], row["disabled_reason"]) for row in services] == [("enabled", None)]
    for verb in ("disable", "enable", "drain"):
        assert "There is no host nosuch" in refused("host", verb, "nosuch", "--dir", cloud.directory)
    assert "nowhere" in refused("host", "disable", "nowhere", "--dir", cloud.directory)
    assert "local://" in refused("host", "add", "fake-9", "--dir", cloud.directory)
    empty = cloud.directory.parent / "empty"
    empty.mkdir()
    assert "no cloud yet" in refused("host", "list", "--dir", empty)

    for line in ok("check", "--dir", cloud.directory).splitlines():
        assert line.startswith("ok")
    assert ok("db", "upgrade", "--dir", cloud.directory).count("is current") == 5


def test_a_new_host_is_told_how_to_reach_the_brokers(tmp_path: Path) -> None:
    file = tmp_path / "micronova.toml"
    file.write_text('[default]\ntransport_url = "amqp://admin:hush@one:1234,[::1],three/region"\n')
    place = ("--dir", tmp_path / "cloud", "--config", file)
    (tmp_path / "cloud").mkdir()
    ok("db", "upgrade", *place)
    said = ok("host", "add", "compute-9", *place)
    settings = tomllib.loads(said.partition("the settings of")[2].partition("\n")[2])["default"]
    assert settings["host"] == "compute-9" and "hush" not in said
    login, _, brokers = settings["transport_url"].removeprefix("amqp://").partition("@")
    # Letters alone: no shell and no option parser takes the password for anything else.
    assert re.fullmatch("compute-9:[A-Za-z]{24}", login)
    assert brokers == "one:1234,[::1]:5672,three:5672/region"
    assert "rabbitmqctl set_permissions -p 'region' compute-9 " in said


def test_state_survives_a_restart(cloud: UpCloud) -> None:
    token = _ensure_up(cloud)
    _create(cloud, token, "kept", 3)
    _until(_all_active(cloud, token, "kept", 3), "the servers")
    before = {server["id"]: server["addresses"] for server in _servers(cloud, token, "kept")}
    keys = (cloud.directory / "keys.json").read_bytes()
    assert cloud.down().strip() == "stopped"
    assert not (cloud.directory / "micronova.pid").exists() and not (cloud.directory / "control.sock").exists()
    assert "No cloud" in refused("status", "--dir", cloud.directory)
    assert "No cloud" in refused("down", "--dir", cloud.directory)

    cloud.up()
    assert (cloud.directory / "keys.json").read_bytes() == keys
    assert cloud.compute("GET", "/servers", token=token), "a token from before is still good"
    servers = _servers(cloud, token, "kept")
    assert {server["id"]: server["addresses"] for server in servers} == before
    assert {server["status"] for server in servers} == {"ACTIVE"}
    # They are not only rows: their guests answer, and can be worked with.
    id = servers[0]["id"]
    shown = cloud.compute("POST", f"/servers/{id}/action", {"os-getConsoleOutput": {}}, token=token)
    assert "login:" in shown["output"]
    cloud.compute("POST", f"/servers/{id}/action", {"reboot": {"type": "HARD"}}, token=token, status=202)
    _until(_all_active(cloud, token, "kept", 3), "the reboot")
    _until(lambda: cloud.audit() == [], "a clean audit")


def test_two_clouds_side_by_side(cloud: UpCloud, other: UpCloud) -> None:
    token = _ensure_up(cloud)
    assert "11 simulated hosts" in other.up()
    listed = [line.split()[0] for line in ok("host", "list", "--dir", other.directory).splitlines()[1:]]
    assert listed == [f"fake-{number}" for number in range(1, 12)]
    _create(other, other.token(), "elsewhere")
    _until(_all_active(other, other.token(), "elsewhere", 1), "the server of the other cloud")
    assert _servers(cloud, token, "elsewhere") == []
    got, _, _ = other.request("GET", "/compute/v2.1/servers", headers={"X-Auth-Token": token})
    assert got == 401, "one cloud's token is nothing to another"
    other.down()
    assert cloud.token()


# --- ends ----------------------------------------------------------------------------------------------------------


def _operations(cloud: UpCloud) -> list[tuple[str, int]]:
    """Return owner and end of the lease of every operation that is not finished, from a cloud that is down."""
    with contextlib.closing(
        sqlite3.connect(f"file:{cloud.directory / 'compute.sqlite'}?mode=ro", uri=True)
    ) as database:
        return database.execute("SELECT owner, lease_until FROM operations WHERE finished_at IS NULL").fetchall()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_it_cleanly_and_work_goes_on_later(cloud: UpCloud, number: signal.Signals) -> None:
    if micronova("status", "--dir", cloud.directory, "--json").returncode == 0:
        cloud.down()
    child = cloud.foreground()
    token = cloud.token()
    name = f"slow-{number.name.lower()}"
    _create(cloud, token, name, 4)
    _until(lambda: any(server["OS-EXT-STS:task_state"] == "spawning" for server in _servers(cloud, token, name)), name)
    begin = time.monotonic()
    child.send_signal(number)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 0
    assert time.monotonic() - begin < 10
    assert "Traceback" not in errors and "never retrieved" not in errors, errors
    assert "stopping" in errors and errors.rstrip().endswith("stopped")
    left = _operations(cloud)
    assert left, "the builds were under way"
    # What a host had begun stays that host's, for it to take up again; a conductor keeps nothing.
    held = [owner for owner, until in left if owner and not owner.startswith("host:") and until > time.time() * 1e6]
    assert not held, f"leases are given back: {left}"

    cloud.up()
    _until(_all_active(cloud, token, name, 4), "the servers, after the restart")
    _until(lambda: cloud.audit() == [], "a clean audit")


def test_a_power_cut_during_builds(cloud: UpCloud) -> None:
    """kill -9 at three moments; each time everything converges, and nothing is lost or left.

    The second time it is off for so long that every host counts as down when it comes back: builds wait for them.
    """
    token = _ensure_up(cloud)
    for moment in range(3):
        name = f"slow-cut-{moment}"
        _create(cloud, token, name, 6)
        _create(cloud, token, f"quick-cut-{moment}", 6)
        time.sleep(0.05 + moment * 0.4)  # the moment is the point
        cloud.kill()
        _until(lambda: not _alive(cloud), "the end of the process")
        if moment == 1:
            time.sleep(DOWN_TIME + 0.5)
        cloud.up()
        _until(_all_active(cloud, token, name, 6), name)
        _until(_all_active(cloud, token, f"quick-cut-{moment}", 6), "the quick ones")
    for server in cloud.compute("GET", "/servers", token=token)["servers"]:
        cloud.compute("DELETE", f"/servers/{server['id']}", token=token, status=204)
    cloud.kill()
    _until(lambda: not _alive(cloud), "the end of the process")
    cloud.up()
    _until(lambda: not cloud.compute("GET", "/servers", token=token)["servers"], "the deletes")
    _until(lambda: cloud.audit() == [], "a clean audit")
    ports = cloud.request("GET", "/network/v2.0/ports", headers={"X-Auth-Token": token})[1]["ports"]
    assert not [port for port in ports if port["device_owner"].startswith("compute:")]
    limits = cloud.compute("GET", "/limits", token=token)["limits"]["absolute"]
    assert (limits["totalInstancesUsed"], limits["totalCoresUsed"], limits["totalRAMUsed"]) == (0, 0, 0)


def test_work_of_a_killed_conductor_does_not_wait_for_its_lease(tmp_path: Path) -> None:
    """The next conductor in the directory knows that the one before is dead."""
    cloud = UpCloud(tmp_path / "long", "--hosts", "3", settings=SETTINGS.replace("lease = 2.0", "lease = 600.0"))
    cloud.up()
    try:
        token = cloud.token()
        # While another process writes to the network service's database, the conductor cannot create the ports.
        with contextlib.closing(sqlite3.connect(cloud.directory / "network.sqlite", isolation_level=None)) as network:
            network.execute("BEGIN IMMEDIATE")
            _create(cloud, token, "held", 8)
            _until(lambda: _held_by_conductor(cloud) == 8, "a conductor with leases")
            cloud.kill()
            _until(lambda: not _alive(cloud), "the end of the process")
        assert _held_by_conductor(cloud) == 8
        cloud.up()
        _until(_all_active(cloud, token, "held", 8), "the servers")
    finally:
        _ensure_down(cloud)


def _held_by_conductor(cloud: UpCloud) -> int:
    return sum(owner is not None and owner.startswith("conductor:") for owner, _ in _operations(cloud))


def _alive(cloud: UpCloud) -> bool:
    """Return whether a thread of the process is left: its first one may end before another, and files stay open."""
    try:
        states = [file.read_text() for file in Path(f"/proc/{cloud.pid}/task").glob("*/status")]
    except OSError:  # one of them has ended meanwhile
        return Path(f"/proc/{cloud.pid}").exists()
    return any("\nState:\tZ" not in state for state in states)


async def test_ssh_does_not_go_to_a_port_that_only_says_it_is_the_servers(cloud: UpCloud, tmp_path: Path) -> None:
    admin = _ensure_up(cloud)
    demo = cloud.token("demo", "demo")

    def network(method: str, path: str, body: Any = None, *, token: str) -> Any:
        status, answer, _ = cloud.request(method, f"/network/v2.0{path}", body, {"X-Auth-Token": token})
        assert status < 300, (method, path, answer)
        return answer

    _create(cloud, admin, "target")
    _until(_all_active(cloud, admin, "target", 1), "the server")
    [server] = _servers(cloud, admin, "target")
    [private] = network("GET", "/networks?name=private", token=demo)["networks"]
    [public] = network("GET", "/networks?router:external=true", token=demo)["networks"]
    claim = {"network_id": private["id"], "device_id": server["id"]}
    foreign = network("POST", "/ports", {"port": claim}, token=demo)["port"]
    floating = {"floating_network_id": public["id"], "port_id": foreign["id"]}
    trap = network("POST", "/floatingips", {"floatingip": floating}, token=demo)["floatingip"]

    session = open_session(cloud.directory / "clouds.yaml", "micronova")
    address, _ = await _prepare(session, "target", tmp_path / "key", yes=True)
    assert address != trap["floating_ip_address"]
    [used] = network("GET", f"/floatingips?floating_ip_address={address}", token=admin)["floatingips"]
    [port] = network("GET", f"/ports?id={used['port_id']}", token=admin)["ports"]
    assert port["project_id"] == server["tenant_id"] and port["device_id"] == server["id"]
    for path in (f"/floatingips/{trap['id']}", f"/floatingips/{used['id']}", f"/ports/{foreign['id']}"):
        network("DELETE", path, token=admin)


# --- what goes wrong -----------------------------------------------------------------------------------------------

BAD_SETTINGS = {
    "not TOML": ("[quota\n", "TOML"),
    "an unknown section": ("[zork]\na = 1\n", "There is no section zork"),
    "an unknown option": ("[quota]\nzork = 1\n", "There is no setting quota.zork"),
    "a wrong type": ('[quota]\ninstances = "many"\n', "quota.instances"),
    "out of range": ("[conductor]\nlease = -1\n", "conductor.lease"),
    "an unknown bus": ('[default]\ntransport_url = "kafka://x"\n', "kafka"),
    "a broker's bad port": ('[default]\ntransport_url = "amqp://u:hush@x:zork/"\n', "transport_url"),
    "no broker": ('[default]\ntransport_url = "amqp://u:hush@127.0.0.1:1/"\n', "broker"),
    "an unknown database": ('[database]\nconnection = "mysql://x"\n', "mysql"),
    "no database": ('[database]\nconnection = "postgresql://u:hush@127.0.0.1:1/x"\n', "database"),
    "an unknown filter": ('[filter_scheduler]\nenabled_filters = ["ZorkFilter"]\n', "ZorkFilter"),
    "no policy file": ('[api]\npolicy_file = "no-such.yaml"\n', "no-such.yaml"),
    "no certificate": ('[api]\ntls_certificate = "no-such.pem"\ntls_key = "no-such.key"\n', "no-such.pem"),
    "half of TLS": ('[api]\ntls_key = "no-such.key"\n', "tls_certificate"),
    "a bad fault rule": ('[[fake.rules]]\noperation = "zork"\n', "rule"),
}


@pytest.mark.parametrize("what", BAD_SETTINGS)
def test_bad_settings_are_one_line(tmp_path: Path, what: str) -> None:
    text, word = BAD_SETTINGS[what]
    file = tmp_path / "micronova.toml"
    file.write_text(text)
    said = refused("up", "--driver", "fake", "--dir", tmp_path / "cloud", "--port", str(free_port()), "--config", file)
    assert word in said and "hush" not in said


def test_bad_settings_are_told_when_it_starts_in_the_background(tmp_path: Path) -> None:
    file = tmp_path / "micronova.toml"
    file.write_text(BAD_SETTINGS["an unknown filter"][0])
    place = ("--dir", tmp_path / "cloud", "--port", str(free_port()))
    assert "ZorkFilter" in refused("up", "--driver", "fake", *place, "--config", file, "--detach")
    # Nothing is left that would be in the way of the next start.
    assert "Micronova is up" in ok("up", "--driver", "fake", *place, "--detach")
    ok("down", "--dir", tmp_path / "cloud")


@pytest.mark.parametrize("user", ["", '[default]\nuser = "root"\n'], ids=["service user", "root"])
@pytest.mark.parametrize("how", [(), ("--detach",)])
def test_a_start_that_fails_leaves_no_new_directory(tmp_path: Path, how: tuple[str, ...], user: str) -> None:
    file = tmp_path / "micronova.toml"
    file.write_text(f'{user}[database]\nconnection = "sqlite:////nowhere/compute.sqlite"\n')
    new, old = tmp_path / "new", tmp_path / "old"
    old.mkdir()
    for place in (new, old):
        refused("up", "--driver", "fake", "--port", "0", "--config", file, "--dir", place, *how)
    assert old.is_dir() and not new.exists()


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for more in ((), ("--detach",)):
            said = refused("up", "--driver", "fake", "--dir", tmp_path / "cloud", "--port", port, *more)
            assert port in said and "in use" in said


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("up", "--zork"), "--zork"),
    (("up", "--port", "99999"), "--port"),
    (("up", "--port", "zork"), "--port"),
    (("up", "--hosts", "0"), "--hosts"),
    (("up", "--driver", "zork"), "--driver"),
    (("up", "--listen", "192.0.2.1", "--dir", "{dir}", "--port", "1"), "--listen"),
    (("up", "--driver", "fake", "--listen", "300.1.1.1", "--dir", "{dir}"), "--listen"),
    (("up", "--driver", "fake", "--dir", "/dev/null/x"), "/dev/null/x"),
    (("zork",), "zork"),
    (("db", "zork"), "zork"),
    (("run", "zork"), "zork"),
    (("run", "api", "--dir", "{dir}"), "transport_url"),
    (("run", "api", "--config", "/no/such.toml"), "/no/such.toml"),
    (("run",), "ROLE"),
    (("down", "--dir", "{dir}"), "No cloud"),
    (("status", "--dir", "{dir}"), "No cloud"),
    (("audit", "--dir", "{dir}"), "No cloud"),
    (("timeline", "x", "--dir", "{dir}"), "No cloud"),
    (("timeline",), "SERVER"),
    (("explain",), "SERVER"),
    (("explain", "x", "--dir", "{dir}"), "No cloud"),
    (("explain", "x", "--dry-run"), "SERVER"),
    (("explain", "--dry-run"), "--flavor"),
    (("explain", "--flavor", "x"), "--dry-run"),
    (("explain", "--dry-run", "--flavor", "x", "--hint", "junk"), "KEY=VALUE"),
    (("explain", "--dry-run", "--flavor", "x", "--count", "0"), "--count"),
    (("explain", "--heat-map", "x.svg", "--json"), "--json"),
    (("explain", "x", "--by", "disk"), "--by"),
    (("host", "list", "--dir", "{dir}/none"), "no cloud"),
    (("host", "disable", "--dir", "{dir}"), "NAME"),
    (("db", "upgrade", "--dir", "{dir}/none"), "no cloud"),
    (("connect", "nohost", "22", "--dir", "{dir}"), "nohost is no IP address"),
    (("config", "--config", "/no/such.toml"), "/no/such.toml"),
    (("policy", "check", "--file", "/no/such.yaml"), "/no/such.yaml"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: " ".join(case[0]))
def test_what_cannot_be_done_is_one_line(tmp_path: Path, case: tuple[tuple[str, ...], str]) -> None:
    arguments, word = case
    # The default port may be in use by a cloud of the person who runs the tests.
    line = refused(
        *(argument.replace("{dir}", str(tmp_path)) for argument in arguments),
        env={"MICRONOVA__API__PORT": str(free_port())},
    )
    assert word in line


def test_a_damaged_state_is_one_line(tmp_path: Path) -> None:
    place = tmp_path / "cloud"
    place.mkdir()
    (place / "keys.json").write_text("{")
    assert "keys.json" in refused("up", "--driver", "fake", "--dir", place, "--port", str(free_port()))
    (place / "keys.json").unlink()
    (place / "compute.sqlite").write_bytes(b"this is not a database" * 100)
    assert "compute.sqlite" in refused("up", "--driver", "fake", "--dir", place, "--port", str(free_port()))


# --- without a cloud -----------------------------------------------------------------------------------------------


def test_settings_can_be_listed_and_read_back(tmp_path: Path) -> None:
    text = ok("config")
    file = tmp_path / "micronova.toml"
    file.write_text(text)
    assert tomllib.loads(text).keys() >= {"default", "api", "database", "quota"}
    assert ok("config", "--config", file) == text
    file.write_text("[quota]\ninstances = 77\n")
    assert "\ninstances = 77\n" in ok("config", "--config", file)
    assert "\ninstances = 78\n" in ok("config", "--config", file, env={"MICRONOVA__QUOTA__INSTANCES": "78"})


def test_policy_check() -> None:
    def rules(*arguments: str) -> dict[str, str]:
        lines = ok("policy", "check", *arguments).splitlines()[1:]
        return {line.split()[-1]: " ".join(line.split()[:-1]) for line in lines}

    member, reader, admin = (rules("--role", role) for role in ("member", "reader", "admin"))
    assert member["os_compute_api:servers:start"] == "yes -"
    assert reader["os_compute_api:servers:start"] == "- -"
    assert admin["os_compute_api:servers:start"] == "yes yes"
    assert set(rules("--rule", "os_compute_api:servers")) < set(member)


def test_check_and_upgrade_a_new_place(tmp_path: Path) -> None:
    place = tmp_path / "cloud"
    assert f"ok    state_path: {place} would be made\n" in ok("check", "--dir", place)
    assert not place.exists()
    place.mkdir()
    assert ok("db", "upgrade", "--dir", place).count("empty →") == 5
    assert ok("db", "upgrade", "--dir", place).count("is current") == 5
    assert "FAIL" not in ok("check", "--dir", place)
    file = tmp_path / "micronova.toml"
    file.write_text('[default]\ntransport_url = "amqp://u:hush@127.0.0.1:1/"\n')
    done = micronova("check", "--dir", place, "--config", file)
    assert done.returncode == 1 and "FAIL  broker" in done.stdout and "hush" not in done.stdout + done.stderr


def test_check_makes_nothing_and_says_what_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "micronova.toml"
    state, nowhere = tmp_path / "state", "127.0.0.1:1"
    file.write_text(
        f'[default]\nstate_path = "{state}"\ntransport_url = "amqp://u:hush@{nowhere}/"\n'
        f'[database]\nconnection = "postgresql://u:hush@{nowhere}/none"\n'
        f'[identity]\nauth_url = "http://{nowhere}/v3"\npassword = "hush"\n'
        f'[glance]\nendpoint_override = "http://{nowhere}"\n'
    )
    done = micronova("check", "--config", file)
    found = [line.partition(":")[0] for line in done.stdout.splitlines() if line.startswith("FAIL")]
    services = ("identity", "image", "network", "volume")
    assert found == [
        "FAIL  keys",  # processes that share a broker need one key, and there is none
        "FAIL  message bus settings",
        *(f"FAIL  database {name}" for name in ("compute", *services)),
        "FAIL  broker",
        *(f"FAIL  service {name}" for name in services),
    ]
    assert done.returncode == 1 and done.stderr == "" and "hush" not in done.stdout and not state.exists()
    # The reason is the system's, in words, and not the name of a Python class.
    assert "ClientConnector" not in done.stdout
    file.write_text(f'[default]\nstate_path = "{state}"\ntransport_url = "amqp://u:hush@{nowhere}/"\n')
    assert f"ok    state_path: {state} would be made\n" in micronova("check", "--config", file).stdout
    file.write_text(f'[default]\nstate_path = "{state}"\n[identity]\nauth_url = "http://{nowhere}/v3"\n')
    refused = "FAIL  service identity: identity.password: the user micronova has no password."
    assert refused in micronova("check", "--config", file).stdout
    state.mkdir()
    micronova("check", "--config", file)
    assert list(state.iterdir()) == []


def test_check_refuses_the_keys_of_the_examples(tmp_path: Path) -> None:
    file = tmp_path / "micronova.toml"
    for key, fails in (("1" * 64, 3), ("0123456789abcdef" * 4, 0)):
        file.write_text(
            "".join(
                f'[{section}]\n{option} = "{key}"\n'
                for section, option in (("default", "secret_key"), ("glance", "ticket_key"), ("neutron", "ticket_key"))
            )
        )
        done = micronova("check", "--dir", tmp_path / "cloud", "--config", file)
        assert done.stdout.count("openssl rand -hex 32") == done.stdout.count("FAIL") == fails
        assert done.returncode == (1 if fails else 0) and key not in done.stdout


def test_roles_run_by_name_in_one_process(tmp_path: Path) -> None:
    """`micronova run` with every role on the local bus is the same cloud, without the conveniences of `up`."""
    cloud = UpCloud(tmp_path / "cloud")
    roles = ("api", "conductor", "scheduler", "compute", "identity", "image", "network")
    file = tmp_path / "micronova.toml"
    file.write_text(f"[api]\nport = {cloud.port}\n")
    child = cloud.start_command("run", *roles, "--dir", cloud.directory, "--config", file)
    try:
        _until(lambda: child.poll() is not None or _answers(cloud), "an answer")
        token = cloud.token()
        _create(cloud, token, "plain")
        _until(_all_active(cloud, token, "plain", 1), "the server")
    finally:
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=30)
    assert child.returncode == 0 and "Traceback" not in errors, errors


def _answers(cloud: UpCloud) -> bool:
    try:
        return cloud.request("GET", "/identity/v3")[0] == 200
    except OSError:
        return False
