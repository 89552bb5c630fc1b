"""`micronova region init`: the files that it writes are those of a region that can work."""

import asyncio
import contextlib
import errno
import os
import pwd
import re
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy.engine import make_url

from micronova.cli.check import report
from micronova.cli.checks.shape import CheckResult
from micronova.cli.hosts import add as add_host
from micronova.cli.private_services.postgres import PrivatePostgres
from micronova.cli.region.certificates import renew_certificate
from micronova.cli.state import StateDirectory
from micronova.cli.wiring import Process
from micronova.conf.settings import Settings, SettingsError, load
from micronova.http.client import HTTPTransport
from micronova.http.server import check_certificate
from micronova.http.sockets import listen
from micronova.objects.errors import MicronovaError, Unavailable
from micronova.rpc.amqp.url import parse
from tests.cluster import toml
from tests.command import micronova, ok, refused
from tests.region_docs import PAGE, commands
from tests.services.process import free_port


def init(directory: Path, *options: str) -> Path:
    place = directory / "region"
    ok("region", "init", "--dir", place, *options)
    return place


def processes(place: Path) -> dict[str, Settings]:
    """Return the settings of each process, as its unit starts it."""
    found = {}
    for file in (place / "etc").glob("*.env"):
        own = dict(line.split("=", 1) for line in file.read_text().splitlines())
        assert own.pop("ROLES").split()
        found[file.stem] = load(place / "etc" / "micronova.toml", environ=own)
    return found


def test_every_process_has_a_name_and_a_port_of_its_own(tmp_path: Path) -> None:
    place = init(tmp_path, "--conductors", "3", "--schedulers", "2", "--address", "control.example")
    found = processes(place)
    assert {name for name in found if name.startswith(("conductor", "scheduler"))} == {
        "conductor-1", "conductor-2", "conductor-3", "scheduler-1", "scheduler-2",
    }  # fmt: skip
    assert len({settings.default.host for settings in found.values()}) == len(found)
    serving = [settings for name, settings in found.items() if "-" not in name]
    assert len({settings.api.port for settings in serving}) == len(serving) == 7
    assert len({settings.default.secret_key for settings in found.values()}) == 1
    for name, settings in found.items():
        if name in ("identity", "api", "image", "network", "volume"):
            assert settings.api.public_url == f"http://control.example:{settings.api.port}"
    one = found["api"]
    assert one.glance.endpoint_override == f"http://control.example:{found['image'].api.port}/image"
    assert one.nova.endpoint_override == f"http://control.example:{one.api.port}/compute/v2.1"


def test_the_secrets_agree_and_nobody_else_reads_them(tmp_path: Path) -> None:
    place = init(tmp_path)
    settings = load(place / "etc" / "micronova.toml", environ={})
    url, broker = make_url(settings.database.connection), parse(settings.default.transport_url)
    assert f"CREATE ROLE {url.username} LOGIN PASSWORD '{url.password}';" in (place / "postgresql.sql").read_text()
    assert f"echo {broker.password} | rabbitmqctl add_user {broker.user}\n" in (place / "broker.sh").read_text()
    assert settings.default.control_users == (broker.user,)
    keys = StateDirectory(place / "state" / "identity").keys()
    clouds = yaml.safe_load((place / "clouds.yaml").read_text())["clouds"]
    assert clouds["micronova"]["auth"]["password"] == keys.admin_password
    assert clouds["micronova"]["auth"]["auth_url"] == settings.identity.auth_url
    open_to_others = [file for file in place.rglob("*") if file.is_file() and stat.S_IMODE(file.stat().st_mode) & 0o077]
    assert not open_to_others


def test_a_proxy_in_front(tmp_path: Path) -> None:
    place = init(tmp_path, "--public-url", "https://cloud.example", "--broker", "a,b:5000", "--database", "[::1]:1")
    found = processes(place)
    assert {each.api.public_url for name, each in found.items() if "-" not in name} == {"https://cloud.example"}
    assert found["identity"].neutron.public_endpoint == "https://cloud.example/network"
    assert found["identity"].neutron.endpoint_override == "http://127.0.0.1:9696/network"
    assert parse(found["api"].default.transport_url).hosts == (("a", 5672), ("b", 5000))
    assert make_url(found["api"].database.connection).host == "::1"
    proxy = (place / "proxy.conf").read_text()
    assert "location /compute { proxy_pass http://127.0.0.1:8774; }" in proxy
    assert "server_name cloud.example;" in proxy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "a b"], "is no name for a host"),
        (["--host", "x", "--host", "x"], "the same name"),
        (["--host", "api"], "name of a process"),
        (["--address", "a/b"], "is no address"),
        (["--broker", "a,;"], "is no HOST or HOST:PORT"),
        (["--public-url", "cloud.example"], "is no scheme://HOST"),
        (["--region-name", 'One"\nx = 1'], "is no name for a region"),
        (["--region-name", ""], "is no name for a region"),
    ],
)
def test_what_init_refuses(tmp_path: Path, options: list[str], message: str) -> None:
    assert message in refused("region", "init", "--dir", tmp_path / "region", *options)
    assert not (tmp_path / "region").exists()


def test_init_overwrites_nothing_and_up_wants_a_trial(tmp_path: Path) -> None:
    place = init(tmp_path)
    assert "is not empty" in refused("region", "init", "--dir", place)
    assert "not for a trial" in refused("region", "up", "--dir", place)
    assert "There is no region in" in refused("region", "down", "--dir", tmp_path)


@pytest.mark.parametrize(
    ("offset", "name"), [(7, "database"), (8, "broker"), (9, "epmd of the broker"), (0, "identity")]
)
def test_a_trial_does_not_use_the_port_of_another_program(services_dir: Path, offset: int, name: str) -> None:
    """A PostgreSQL that listens there would be taken for the trial's own."""
    place = services_dir / f"ports-{offset}"
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        ok("region", "init", "--dir", place, "--driver", "fake", "--first-port", str(port - offset))
        said = refused("region", "up", "--dir", place, name.split()[-1])
    assert f"Another program listens on 127.0.0.1:{port}, the port of the {name}: stop it, or make the region" in said
    assert "--first-port 20000" in said
    assert not (place / "private").exists()


def test_a_record_that_was_written_half_is_of_nothing_that_runs(tmp_path: Path) -> None:
    place = init(tmp_path, "--driver", "fake")
    (place / "run").mkdir()
    (place / "run" / "api.json").write_text('{"pid":')
    assert ok("region", "down", "--dir", place) == "Nothing ran.\n"


def test_only_the_data_of_a_private_postgresql_is_not_of_who_starts_it(services_dir: Path) -> None:
    """Root writes logs and keys where the user that PostgreSQL runs as can put no links."""
    server = PrivatePostgres(services_dir / "owners", free_port())
    server.create("postgres", durable=False)
    server.launch()
    try:
        assert server.directory.stat().st_uid == (server.directory / "log").stat().st_uid == os.geteuid()
        owner = pwd.getpwnam("postgres").pw_uid if os.geteuid() == 0 else os.geteuid()
        assert (server.data.stat().st_uid, stat.S_IMODE(server.data.stat().st_mode)) == (owner, 0o700)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("address", "listen"),
    [("::1", "::1"), ("[::1]", "::1"), ("2001:db8::1", "::"), ("192.0.2.1", "0.0.0.0"), ("127.0.0.2", "127.0.0.2")],
)
def test_the_services_listen_where_their_address_is(tmp_path: Path, address: str, listen: str) -> None:
    place = init(tmp_path, "--address", address, "--driver", "fake")
    assert {each.api.listen for each in processes(place).values()} == {listen}
    assert "127.0.0.1" in refused("region", "up", "--dir", place)  # where the services of a trial are


def test_init_for_several_machines_names_places_on_these(tmp_path: Path) -> None:
    options = ("--address", "control.example", "--tls", "--config-dir", "/etc/micronova")
    said = ok("region", "init", "--dir", tmp_path / "region", *options, "--host", "h-1", "--host", "h-2")
    clouds = yaml.safe_load((tmp_path / "region" / "clouds.yaml").read_text())["clouds"]
    assert {each["cacert"] for each in clouds.values()} == {"/etc/micronova/tls/ca.pem"}
    for host in ("h-1", "h-2"):
        assert f"micronova host add {host} --settings {host}.toml --config /etc/micronova/micronova.toml" in said


def test_init_warns_of_passwords_in_clear(tmp_path: Path) -> None:
    for number, (options, warned) in enumerate(
        [
            (("--address", "192.0.2.1"), True),
            (("--database", "db.example"), True),
            (("--address", "192.0.2.1", "--tls"), False),
            ((), False),
        ]
    ):
        done = micronova("region", "init", "--dir", tmp_path / str(number), *options)
        assert done.returncode == 0
        assert ("cross the network in clear" in done.stderr) == warned, options


def database_of(place: Path, directory: Path) -> tuple[str | Path, ...]:
    """Make a database for a region, and return the options that name it."""
    settings = (place / "etc" / "micronova.toml").read_text()
    connection = load(place / "etc" / "micronova.toml", environ={}).database.connection
    config = directory / "micronova.toml"
    config.write_text(settings.replace(connection, f"sqlite:///{directory}/compute.sqlite"))
    where = ("--config", config, "--dir", directory / "tool")
    ok("db", "upgrade", *where)
    return where


def test_host_add_writes_the_settings_of_a_host(tmp_path: Path) -> None:
    place = init(tmp_path, "--tls")
    where = database_of(place, tmp_path)
    file = tmp_path / "compute-9.toml"
    printed = ok("host", "add", "compute-9", "--driver", "fake", "--settings", file, *where)
    [made, allowed] = printed.splitlines()
    assert allowed.startswith("rabbitmqctl set_permissions -p ")
    host = load(file, environ={})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (host.default.host, host.compute.compute_driver) == ("compute-9", "fake")
    broker = parse(host.default.transport_url)
    # By standard input: everybody on the broker's machine sees the arguments of a process.
    assert made == f"echo {broker.password} | rabbitmqctl add_user compute-9" and broker.user == "compute-9"
    assert host.ssl.ca_file == (broker.tls or {})["cafile"] == str(place / "etc" / "tls" / "ca.pem")
    assert "exists" in refused("host", "add", "compute-8", "--settings", file, *where)


def test_a_new_password_of_a_host_leaves_its_other_settings_alone(tmp_path: Path) -> None:
    where = database_of(init(tmp_path), tmp_path)
    file = tmp_path / "compute-17.toml"
    address = ("--console-address", "192.0.2.17:6080")
    ok("host", "add", "compute-17", "--driver", "fake", *address, "--settings", file, *where)
    own = "# ours\n[default]\nresume_guests_state_on_host_boot = true\n"
    file.write_text(file.read_text().replace("[default]\n", own))
    former, text = load(file, environ={}), file.read_text()

    printed = ok("host", "add", "compute-17", "--settings", file, *where)
    renewed = load(file, environ={})
    assert renewed.default.transport_url != former.default.transport_url
    assert f"echo {parse(renewed.default.transport_url).password} | rabbitmqctl change_password" in printed
    assert file.read_text().replace(renewed.default.transport_url, former.default.transport_url) == text
    # On another machine than that of the file, only what changes is told.
    shown = ok("host", "add", "compute-17", *where)
    assert "transport_url = " in shown and "control_users = " in shown and "compute_driver" not in shown
    # A file that was lost is written anew with what is known of the host.
    lost = tmp_path / "lost.toml"
    ok("host", "add", "compute-17", "--settings", lost, *where)
    assert load(lost, environ={}).console.relay_listen == "192.0.2.17:6080"
    # What is not understood is left as it is.
    file.write_text('[default]\nhost = "compute-17"\n')
    assert "by hand" in refused("host", "add", "compute-17", "--settings", file, *where)
    assert file.read_text() == '[default]\nhost = "compute-17"\n'


def test_nobody_else_reads_the_settings_of_a_host_whatever_was_there(tmp_path: Path) -> None:
    where = database_of(init(tmp_path), tmp_path)
    file, target, link = (tmp_path / name for name in ("h.toml", "target", "link"))
    for _ in range(2):  # an empty file, and the settings with the password of before
        file.touch()
        file.chmod(0o644)
        with file.open() as opened:
            ok("host", "add", "h", "--driver", "fake", "--settings", file, *where)
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert parse(load(file, environ={}).default.transport_url).password not in opened.read()
    target.touch()
    link.symlink_to(target)
    assert "Cannot write" in refused("host", "add", "h", "--settings", link, *where)
    assert target.read_text() == ""
    link.unlink()
    os.mkfifo(link)
    assert "not a file" in refused("host", "add", "h", "--settings", link, *where)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_the_settings_of_a_host_go_into_no_file_of_another_user(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text('[default]\nhost = "h"\n')
    os.chown(file, pwd.getpwnam("nobody").pw_uid, -1)
    said = refused("host", "add", "h", "--settings", file, *database_of(init(tmp_path), tmp_path))
    assert "belongs to another user" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes the owner of DIR")
def test_root_writes_the_settings_of_a_host_where_the_owner_of_dir_cannot(tmp_path: Path) -> None:
    where = database_of(init(tmp_path), tmp_path)
    tool, config = tmp_path / "tool", tmp_path / "micronova.toml"
    tool.mkdir(exist_ok=True)
    config.write_text(config.read_text().replace(f"{tmp_path}/compute.sqlite", f"{tool}/compute.sqlite"))
    for each in tmp_path.glob("compute.sqlite*"):
        each.rename(tool / each.name)
    nobody = pwd.getpwnam("nobody")
    for each in (tool, *tool.rglob("*")):
        os.chown(each, nobody.pw_uid, nobody.pw_gid)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    ok("host", "add", "h", "--driver", "fake", "--settings", closed / "h.toml", *where)
    assert load(closed / "h.toml", environ={}).default.host == "h"
    assert (closed / "h.toml").owner() == "root"
    assert [each.name for each in closed.iterdir()] == ["h.toml"]


def test_a_full_disk_leaves_the_settings_of_a_host_and_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = database_of(init(tmp_path), tmp_path)
    file = tmp_path / "h.toml"
    ok("host", "add", "h", "--driver", "fake", "--settings", file, *where)
    former = file.read_text()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = set(tmp_path.iterdir())
    _, config, _, directory = map(Path, where)
    with pytest.raises(MicronovaError, match="No space left"):
        add_host("h", "", directory, config, settings_file=file)
    assert file.read_text() == former and set(tmp_path.iterdir()) == before
    assert capsys.readouterr().out == "", "the broker is not told of a password that no file has"


def run_identity(place: Path, port: int) -> list[str]:
    """Run the role until it is ready, stop it, and return what it said."""
    command = [sys.executable, "-m", "micronova.cli.main", "run", "identity", "--dir", str(place)]
    environment = {**os.environ, "MICRONOVA__API__PORT": str(port)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    said = []
    try:
        assert child.stdout is not None
        for line in child.stdout:
            said.append(line)
            if "identity: ready" in line:
                break
    finally:
        child.terminate()
        child.communicate(timeout=60)
    assert child.returncode == 0 and "identity: ready" in said[-1], said
    return said


def test_run_says_where_clouds_yaml_is(tmp_path: Path) -> None:
    """A role that makes the first users also writes how to log in as them."""
    place, port = tmp_path / "identity", free_port()
    said = run_identity(place, port)
    assert any(f"{place}/clouds.yaml has the URL" in line and f"{place}/keys.json" in line for line in said), said
    cloud = yaml.safe_load((place / "clouds.yaml").read_text())["clouds"]["micronova"]
    assert cloud["auth"]["auth_url"] == f"http://127.0.0.1:{port}/identity/v3"
    assert cloud["auth"]["password"] == StateDirectory(place).keys().admin_password


def test_a_role_runs_without_its_clouds_yaml(tmp_path: Path) -> None:
    """A file that it cannot write ends no role."""
    place, port = tmp_path / "identity", free_port()
    (place / "clouds.yaml").mkdir(parents=True)
    said = run_identity(place, port)
    assert any(f"cannot write {place}/clouds.yaml" in line and f"{place}/keys.json" in line for line in said), said


@contextlib.asynccontextmanager
async def serving(tmp_path: Path, **sections: Any) -> AsyncIterator[str]:
    """An identity service that listens with the certificate of a new region; its base URL."""
    tls = tmp_path / "region" / "etc" / "tls"
    api = {"tls_certificate": str(tls / "certificate.pem"), "tls_key": str(tls / "key.pem")}
    process = Process(load(environ={}, api=api, **sections), ["identity"], StateDirectory(tmp_path / "identity"))
    from micronova.http.sockets import listen

    sock = listen("127.0.0.1", 0)
    await process.start(sock)
    try:
        yield f"https://127.0.0.1:{sock.getsockname()[1]}/identity"
    finally:
        await process.stop()


async def test_a_private_authority_is_trusted_where_it_is_named(tmp_path: Path) -> None:
    place = await asyncio.to_thread(init, tmp_path, "--tls")
    authority = str(place / "etc" / "tls" / "ca.pem")
    async with serving(tmp_path) as url:
        trusting, other = HTTPTransport(url, ca_file=authority), HTTPTransport(url)
        try:
            assert (await trusting.request("GET", "/", {}, None)).status == 300
            with pytest.raises(Unavailable, match=r"certificate of https://.* is not valid: .*ssl\.ca_file"):
                await other.request("GET", "/", {}, None)
        finally:
            await trusting.close()
            await other.close()
        # A process with these settings asks it with the service user's token.
        keys = StateDirectory(tmp_path / "identity").keys()
        identity = {"auth_url": f"{url}/v3", "password": keys.service_password}
        settings = load(environ={}, identity=identity, ssl={"ca_file": authority})
        caller = Process(settings, [], StateDirectory(tmp_path / "caller"))
        try:
            assert await caller.clients.token().get()
        finally:
            await caller.stop()


def test_an_authority_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for file in ("ca.pem", "missing.pem"):
        settings = load(environ={}, identity={"auth_url": "https://x/v3"}, ssl={"ca_file": str(tmp_path / file)})
        with pytest.raises(SettingsError, match=r"ssl\.ca_file .* is no PEM file"):
            Process(settings, [], StateDirectory(tmp_path)).clients.token()


def test_the_certificate_is_for_all_parts_and_signed_by_the_authority(tmp_path: Path) -> None:
    place = init(
        tmp_path, "--tls", "--address", "192.0.2.1", "--database", "db.example", "--broker", "a.example,b.example",
        "--public-url", "https://cloud.example:8443",
    )  # fmt: skip
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate((place / "etc" / "tls" / "certificate.pem").read_bytes())
    authority = x509.load_pem_x509_certificate((place / "etc" / "tls" / "ca.pem").read_bytes())
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"db.example", "a.example", "b.example", "cloud.example"} < set(names.get_values_for_type(x509.DNSName))
    assert "192.0.2.1" in map(str, names.get_values_for_type(x509.IPAddress))
    settings = load(place / "etc" / "micronova.toml", environ={})
    assert parse(settings.default.transport_url).ssl_context() is not None
    assert "sslmode=verify-full" in settings.database.connection
    assert not (place / "etc" / "tls" / "ca.key").exists()


def test_a_certificate_is_renewed_by_the_same_authority(tmp_path: Path) -> None:
    place = init(tmp_path, "--tls", "--address", "192.0.2.1", "--broker", "a.example,b.example")
    from cryptography import x509

    def read(name: str) -> x509.Certificate:
        return x509.load_pem_x509_certificate((place / "etc" / "tls" / name).read_bytes())

    def names(certificate: x509.Certificate) -> object:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value

    tls = place / "etc" / "tls"
    authority, before, key = read("ca.pem"), read("certificate.pem"), (tls / "key.pem").read_bytes()
    for name, mode in (("certificate.pem", 0o644), ("key.pem", 0o640)):
        (tls / name).chmod(mode)
    said = ok("region", "renew", "--dir", place)
    after = read("certificate.pem")
    assert f"{after.not_valid_after_utc:%Y-%m-%d}" in said and "docs/tls.md" in said
    assert after != before and names(after) == names(before) and read("ca.pem") == authority
    after.verify_directly_issued_by(authority)
    check_certificate(str(tls / "certificate.pem"), str(tls / "key.pem"))  # they belong together
    assert (tls / "key.pem").read_bytes() != key and (tls / "key.pem").stat().st_mode & 0o777 == 0o640
    assert sorted(file.name for file in tls.iterdir()) == ["ca.pem", "certificate.pem", "key.pem"]
    hidden = place / "authority" / "ca.key"
    hidden.rename(tmp_path / "ca.key")
    assert "copy it back" in refused("region", "renew", "--dir", place)
    hidden.write_bytes((tls / "key.pem").read_bytes())
    assert "is not the key of" in refused("region", "renew", "--dir", place)
    plain = init(tmp_path / "plain")
    assert "without --tls" in refused("region", "renew", "--dir", plain)


def test_a_certificate_that_cannot_be_renewed_fits_to_its_key_still(tmp_path: Path) -> None:
    tls = (place := init(tmp_path, "--tls")) / "etc" / "tls"
    before = [(tls / name).read_bytes() for name in ("certificate.pem", "key.pem")]
    (tls / "key.pem.new").mkdir()  # the new key cannot be written
    with pytest.raises(OSError, match=r"key\.pem\.new"):
        renew_certificate(place)
    assert [(tls / name).read_bytes() for name in ("certificate.pem", "key.pem")] == before
    check_certificate(str(tls / "certificate.pem"), str(tls / "key.pem"))


async def test_a_process_that_has_not_read_its_new_certificate_is_named(tmp_path: Path) -> None:
    place = init(tmp_path, "--tls")
    tls = {f"tls_{name}": str(place / "etc" / "tls" / f"{name}.pem") for name in ("certificate", "key")}
    settings = load(environ={}, api=tls)
    process = Process(settings, ["identity"], StateDirectory(tmp_path / "state"))
    await process.start(sock := listen("127.0.0.1", 0))
    config = tmp_path / "micronova.toml"
    config.write_text(toml({"api": {**tls, "port": sock.getsockname()[1]}}))

    async def found() -> list[CheckResult]:
        results: list[CheckResult] = []
        await report(["identity"], [config], tmp_path / "state", results.append)
        return [each for each in results if each.name == "certificates" and each.outcome != "ok"]

    try:
        assert await found() == []
        await asyncio.to_thread(ok, "region", "renew", "--dir", place)
        [finding] = await found()
        assert finding.setting == "api.tls_certificate" and "shows another certificate" in finding.found
        assert "SIGHUP" in finding.right and finding.outcome == "unknown"
        process.use_certificate(**{name.removeprefix("tls_"): file for name, file in tls.items()})
        assert await found() == []
    finally:
        await process.stop()


@pytest.mark.parametrize("address", ["192.0.2.1", "::1", "control.example"])
def test_a_proxy_can_verify_the_certificate(tmp_path: Path, address: str) -> None:
    """nginx compares `proxy_ssl_name` with the names in a certificate, not with the addresses in it."""
    from cryptography import x509

    place = init(tmp_path, "--tls", "--address", address)
    certificate = x509.load_pem_x509_certificate((place / "etc" / "tls" / "certificate.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    [name] = re.findall(r"proxy_ssl_name (.*);", (place / "proxy.conf").read_text())
    assert name in names.get_values_for_type(x509.DNSName)


def test_the_page_can_be_followed() -> None:
    """`make region-docs` runs these commands; here they are only found."""
    found = commands(PAGE.read_text())
    assert found[0].startswith("micronova region init ")
    assert found[-1].startswith("micronova region down ")
    for part in ("host add", "host remove", "pg_dump", "pg_restore", "server create", "audit"):
        assert any(part in command for command in found), part
