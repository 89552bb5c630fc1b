"""Root reads in a directory that belongs to the service user, who can put anything there."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from micronova.cli import up
from micronova.cli.main import main
from micronova.cli.state import StateDirectory
from micronova.cli.user_session import open_session
from micronova.objects.errors import MicronovaError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root reads in a directory of another user")

SERVICE, OTHER = 65533, 65532
CLOUDS = "clouds: {micronova: {auth: {auth_url: u, username: n, password: p, project_name: n}}}"


def made(path: Path, uid: int) -> StateDirectory:
    """Return the directory of a cloud that runs as a user."""
    place = StateDirectory(path)
    place.create()
    place.keys()
    for each in (path, *path.iterdir()):
        os.chown(each, uid, uid)
    return place


@pytest.fixture
def place(tmp_path: Path) -> StateDirectory:
    return made(tmp_path / "cloud", SERVICE)


def a_link(file: Path, secret: Path) -> None:
    file.symlink_to(secret)


def a_link_to_nothing(file: Path, secret: Path) -> None:
    file.symlink_to(secret.with_name("nothing"))


def another_name(file: Path, secret: Path) -> None:
    file.hardlink_to(secret)


def another_users_file(file: Path, secret: Path) -> None:
    file.write_bytes(secret.read_bytes())
    os.chown(file, OTHER, OTHER)


def a_socket(file: Path, secret: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(file))


def a_fifo(file: Path, secret: Path) -> None:
    os.mkfifo(file)


def a_directory(file: Path, secret: Path) -> None:
    file.mkdir()


@pytest.mark.parametrize(
    "put", [a_link, a_link_to_nothing, another_name, another_users_file, a_socket, a_fifo, a_directory]
)
def test_root_reads_only_regular_files_of_the_service_user(
    place: StateDirectory, put: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(name: str, content: bytes) -> None:
        (place.path / name).unlink(missing_ok=True)
        secret = place.path.parent / name
        secret.write_bytes(content)
        put(place.path / name, secret)

    exchange("keys.json", (place.path / "keys.json").read_bytes())
    with pytest.raises(MicronovaError, match=r"keys\.json"):
        place.keys()
    exchange("clouds.yaml", CLOUDS.encode())
    with pytest.raises(MicronovaError, match=r"clouds\.yaml"):
        open_session(place.path / "clouds.yaml", "micronova")
    exchange("micronova.pid", str(os.getppid()).encode())
    assert place.supervisor_pid(os.getpid()) == os.getpid()
    exchange("micronova.log", b"")
    monkeypatch.setattr(up, "own_command", lambda *_: ["false"])
    with pytest.raises(MicronovaError, match=r"micronova\.log"):
        up._detach(place, [])


def test_root_does_not_hand_over_the_keys_of_another_cloud(tmp_path: Path, place: StateDirectory) -> None:
    victim = made(tmp_path / "victim", OTHER)
    secrets = (victim.path / "keys.json").read_text()
    file = place.path / "keys.json"
    file.unlink()
    file.symlink_to(victim.path / "keys.json")
    result = CliRunner().invoke(main, ["token-key", "rotate", "--dir", str(place.path)])
    assert result.exit_code != 0 and "keys.json is not a regular file" in result.output
    assert file.is_symlink() and (victim.path / "keys.json").read_text() == secrets


def test_root_reads_what_the_service_user_or_root_wrote(place: StateDirectory) -> None:
    keys = place.keys()
    assert place.write_clouds("http://127.0.0.1:1", keys, "r").lstat().st_nlink == 1
    assert open_session(place.path / "clouds.yaml", "micronova").auth_url == "http://127.0.0.1:1/identity"
    place.rotate_token_key(0.0, 120.0, 3600.0)
    assert len(place.token_keys()) == 2 and (place.path / "keys.json").stat().st_uid == SERVICE


def test_a_file_that_root_writes_is_the_service_users_before_it_has_its_name(
    place: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace
    roots = place.path.parent / "root's"
    roots.touch()

    def exchange(self: Path, target: Path) -> Path:
        """Do what the service user can do as soon as the file has its name."""
        made = replace(self, target)
        assert target.stat().st_uid == SERVICE
        return replace(roots, made)

    monkeypatch.setattr(Path, "replace", exchange)
    place.rotate_token_key(0.0, 120.0, 3600.0)
    assert (place.path / "keys.json").stat().st_uid == 0


def test_keys_that_root_makes_in_the_service_users_directory_are_that_users(place: StateDirectory) -> None:
    (place.path / "keys.json").unlink()
    place.keys()
    assert (place.path / "keys.json").stat().st_uid == SERVICE


def test_keys_survive_a_loss_of_power(tmp_path: Path, synced: list[Path]) -> None:
    made = StateDirectory(tmp_path / "cloud")
    made.create()
    made.keys()
    assert made.path in synced
