"""SIGHUP: levels, policy files and certificates are read again, all of them or nothing; and what the log says."""

import asyncio
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from micronova.cli.reload import Reloader, SettingsSource
from micronova.conf.settings import Settings, load
from micronova.http.sockets import listen
from tests.functional.full_cloud import FullCloud
from tests.services.process import free_port

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJzT0VpP0wqvN2aAuDIyvZ0L2nKQZ3bEJ5kVqZ0xq1mB"
RULE = "os_compute_api:os-hypervisors:list"

together = pytest.mark.asyncio(loop_scope="module")


def _certificate(directory: Path, name: str) -> None:
    """Write a certificate for a name, and its key, over those that are there."""
    key = ec.generate_private_key(ec.SECP256R1())
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(named)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    (directory / "certificate.pem").write_bytes(made.public_bytes(Encoding.PEM))
    (directory / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


class ReloadingCloud:
    """A cloud with a policy file and a certificate, and settings that change."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.policy, self.file = directory / "policy.yaml", directory / "settings.toml"
        self.policy.write_text(f'"{RULE}": "role:admin"\n')
        self.file.write_text("")
        _certificate(directory, "first.example")
        api = {
            "policy_file": str(self.policy),
            "tls_certificate": str(directory / "certificate.pem"),
            "tls_key": str(directory / "key.pem"),
        }
        self.cloud = FullCloud(directory / "state", api=api)
        self.reloader = Reloader(self.cloud.process, SettingsSource(self.read(), self.read))

    def read(self) -> Settings:
        return load(self.file, {})

    def shown_certificate(self) -> str:
        """Return the name in the certificate that a client sees which connects now."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        port = int(self.cloud.process.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 10) as plain, context.wrap_socket(plain) as secure:
            found = secure.getpeercert(binary_form=True)
        assert found is not None
        return str(x509.load_der_x509_certificate(found).subject.rfc4514_string())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reloading(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ReloadingCloud]:
    made = ReloadingCloud(tmp_path_factory.mktemp("reloading"))
    await made.cloud.start(listen("127.0.0.1", 0))
    yield made
    await made.cloud.stop()


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    names = ("", "scheduler", "micronova.scheduler")
    before = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@together
async def test_everything_that_can_change_is_reloaded(
    reloading: ReloadingCloud, caplog: pytest.LogCaptureFixture
) -> None:
    cloud = reloading.cloud
    member = await cloud.person("member")
    assert (await member.request("GET", "/compute/v2.1/os-hypervisors")).status == 403
    assert await asyncio.to_thread(reloading.shown_certificate) == "CN=first.example"
    reloading.policy.write_text(f'"{RULE}": ""\n')
    _certificate(reloading.directory, "second.example")
    reloading.file.write_text(
        '[default]\nlog_level = "INFO"\ndefault_log_levels = ["scheduler=DEBUG"]\nmax_concurrent_builds = 3\n'
        "[api]\naccess_log = true\n"
    )
    reloading.reloader.reload()
    said = caplog.messages[-1]
    assert said.startswith("SIGHUP: reloaded log levels, the access log, the policy file ")
    assert "the certificate " in said and said.endswith("a restart is needed for default.max_concurrent_builds")
    assert (await member.request("GET", "/compute/v2.1/os-hypervisors")).status == 200
    assert await asyncio.to_thread(reloading.shown_certificate) == "CN=second.example"
    assert logging.getLogger("micronova.scheduler.manager").getEffectiveLevel() == logging.DEBUG
    assert cloud.process.access_log is not None and cloud.process.access_log.on


@pytest.mark.parametrize("wrong", ["settings", "policy", "certificate"])
@together
async def test_a_file_that_cannot_be_used_changes_nothing(
    reloading: ReloadingCloud, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    _certificate(reloading.directory, "before.example")
    reloading.policy.write_text(f'"{RULE}": "role:admin"\n')
    reloading.file.write_text("")
    reloading.reloader.reload()
    member = await reloading.cloud.person("member")
    level = logging.getLogger().level
    reloading.file.write_text('[default]\nlog_level = "ERROR"\n')
    reloading.policy.write_text(f'"{RULE}": ""\n')
    _certificate(reloading.directory, "after.example")
    match wrong:
        case "settings":
            reloading.file.write_text('[default]\nlog_level = "LOUD"\n')
            named = "default.log_level"
        case "policy":
            reloading.policy.write_text('"os_compute_api:no-such-rule": ""\n')
            named = "no-such-rule"
        case _:
            (reloading.directory / "key.pem").write_text("")
            named = "key.pem"
    caplog.clear()
    reloading.reloader.reload()
    [said] = [message for message in caplog.messages if "SIGHUP" in message]
    assert said.startswith("SIGHUP: nothing is reloaded, and what was loaded before stays: ") and named in said
    assert logging.getLogger().level == level
    assert (await member.request("GET", "/compute/v2.1/os-hypervisors")).status == 403
    assert await asyncio.to_thread(reloading.shown_certificate) == "CN=before.example"


@together
async def test_lines_of_the_log_name_what_is_accepted_and_refused(
    reloading: ReloadingCloud, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    member = await reloading.cloud.person("member")
    await member.do("POST", "/compute/v2.1/os-keypairs", {"keypair": {"name": "logged", "public_key": KEY}})
    [line] = [message for message in caplog.messages if "POST /os-keypairs" in message]
    assert line.startswith("compute: POST /os-keypairs is accepted with 20")
    assert member.user_id in line and member.project_id in line
    body = {"flavor": {"name": "mine", "ram": 1, "vcpus": 1, "disk": 0}}
    assert (await member.request("POST", "/compute/v2.1/flavors", body)).status == 403
    [line] = [message for message in caplog.messages if "POST /flavors" in message]
    assert "is refused with 403" in line and "Policy doesn't allow" in line


class _Workers:
    """`micronova run identity` with two workers."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "settings.toml"
        self.settings = f'[api]\nworkers = 2\nport = {free_port()}\n[default]\nuser = "root"\n'
        self.file.write_text(self.settings)
        command = [sys.executable, "-m", "micronova.cli.main", "run", "identity", "--config", str(self.file)]
        self.process = subprocess.Popen(
            [*command, "--dir", str(directory / "state")],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until_logged(self, text: str, times: int) -> None:
        assert self.process.stderr is not None
        read = []
        for line in self.process.stderr:
            read.append(line)
            times -= text in line
            if not times:
                return
        raise AssertionError(f"{text!r} was not logged: {''.join(read)}")


def test_a_signal_to_the_parent_reaches_all_workers(tmp_path: Path) -> None:
    made = _Workers(tmp_path)
    with made.process:
        try:
            made.until_logged("identity: ready", 2)
            made.file.write_text(made.settings + 'log_level = "LOUD"\n')
            os.kill(made.process.pid, signal.SIGHUP)
            made.until_logged("SIGHUP: nothing is reloaded", 2)
            made.file.write_text(made.settings + 'log_level = "DEBUG"\n')
            os.kill(made.process.pid, signal.SIGHUP)
            made.until_logged("SIGHUP: reloaded log levels", 2)
        finally:
            made.process.terminate()
    assert made.process.returncode == 0


def test_a_log_file_is_opened_anew(tmp_path: Path) -> None:
    log = tmp_path / "identity.log"
    file = tmp_path / "settings.toml"
    file.write_text(f'[api]\nport = {free_port()}\n[default]\nuser = "root"\nlog_file = "{log}"\n')
    command = [sys.executable, "-m", "micronova.cli.main", "run", "identity", "--config", str(file)]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--dir", str(tmp_path / "state")], **options) as process:
        try:
            _until(lambda: log.exists() and "identity: ready" in log.read_text(), process)
            log.rename(tmp_path / "identity.log.1")
            process.send_signal(signal.SIGHUP)
            _until(lambda: log.exists() and "SIGHUP: reloaded" in log.read_text(), process)
        finally:
            process.terminate()
    assert "identity: ready" not in log.read_text()


@pytest.mark.parametrize("wrong", ["the log file", "the settings", "the certificate"])
def test_the_log_file_is_opened_anew_whatever_becomes_of_the_rest(tmp_path: Path, wrong: str) -> None:
    folder, key = tmp_path / "log", tmp_path / "key.pem"
    folder.mkdir()
    _certificate(tmp_path, "identity.example")
    log, file = folder / "identity.log", tmp_path / "settings.toml"
    tls = f'tls_certificate = "{tmp_path}/certificate.pem"\ntls_key = "{key}"\n'
    good = f'[api]\nport = {free_port()}\n{tls}[default]\nuser = "root"\nlog_file = "{log}"\n'
    file.write_text(good)
    command = [sys.executable, "-m", "micronova.cli.main", "run", "identity", "--config", str(file)]
    with subprocess.Popen([*command, "--dir", str(tmp_path / "state")], stdin=subprocess.DEVNULL) as process:
        try:
            _until(lambda: log.exists() and "identity: ready" in log.read_text(), process)
            moved = folder / "identity.log.1"
            log.rename(moved)
            if wrong == "the log file":
                file.write_text(good.replace(str(folder), str(tmp_path / "nowhere")))
                written = moved
            else:
                if wrong == "the settings":
                    file.write_text("[default\n")
                else:
                    key.write_text("")
                written = log
            process.send_signal(signal.SIGHUP)
            _until(lambda: written.exists() and "SIGHUP: " in written.read_text(), process)
        finally:
            process.terminate()
    [said] = [line for line in written.read_text().splitlines() if "SIGHUP: " in line]
    if wrong == "the log file":
        assert "reloaded log levels" in said and "the log file" not in said
        assert "cannot open default.log_file" in written.read_text()
    else:
        assert "nothing is reloaded" in said


def _until(reached: Any, process: "subprocess.Popen[bytes]") -> None:
    """Wait until something is reached: a file of another process tells nobody that it grows."""
    while not reached():
        assert process.poll() is None
        threading.Event().wait(0.1)
