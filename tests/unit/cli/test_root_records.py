"""Root's records of which cloud a directory has: the service user cannot make root work on another cloud."""

import itertools
import os
import pwd
import shutil
import subprocess
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from micronova.cli import root_records, service_user
from micronova.cli.state import StateDirectory
from micronova.conf.libvirt import LibvirtSettings
from micronova.objects.errors import MicronovaError
from micronova.virt.libvirt.storage.guest_users import guest_ids

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root keeps records")


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(root_records, "RECORDS", tmp_path / "records")
    return tmp_path / "records"


def made(path: Path) -> StateDirectory:
    """Start a new cloud, or one that exists, as far as its id is concerned."""
    place = StateDirectory(path)
    service_user.claim(place, service_user.ServiceUser("root", 0, 0))
    root_records.cloud_id(place)
    return place


def same_names(cloud_id: str) -> str:
    """Return the id of another cloud whose namespaces would have the same names."""
    return f"{cloud_id[:-4]}0000" if not cloud_id.endswith("0000") else f"{cloud_id[:-4]}1111"


def same_guests(cloud_id: str) -> str:
    """Return the id of another cloud whose guests would have the same user ids."""
    ids = LibvirtSettings().guest_uids
    block = guest_ids(ids, cloud_id)
    others = (str(uuid.UUID(int=number << 64, version=4)) for number in itertools.count())
    return next(other for other in others if guest_ids(ids, other) == block)


def names(place: StateDirectory, cloud_id: str) -> None:
    """Do what a service user can do."""
    keys = place.keys()
    keys.cloud_id = cloud_id
    place.write("keys.json", msgspec.json.encode(keys))


def test_a_directory_keeps_its_cloud(tmp_path: Path, records: Path) -> None:
    place = made(tmp_path / "c")
    assert root_records.cloud_id(place) == place.keys().cloud_id
    assert records.stat().st_mode & 0o777 == 0o700


def test_another_clouds_id_is_refused(tmp_path: Path) -> None:
    victim, place = made(tmp_path / "victim"), made(tmp_path / "c")
    names(place, victim.keys().cloud_id)
    with pytest.raises(MicronovaError, match="names another cloud than root has recorded"):
        root_records.cloud_id(place)


@pytest.mark.parametrize(
    ("similar", "message"), [(same_names, "has the id of the cloud in"), (same_guests, "user ids of those of")]
)
def test_so_is_one_with_the_same_names_or_users_of_guests(
    tmp_path: Path, similar: Callable[[str], str], message: str
) -> None:
    victim, place = made(tmp_path / "victim"), StateDirectory(tmp_path / "c")
    made(tmp_path / "fine")
    place.create()
    names(place, similar(victim.keys().cloud_id))
    with pytest.raises(MicronovaError, match=f"{message} {victim.path}"):
        root_records.cloud_id(place)
    assert root_records.cloud_id(victim) == victim.keys().cloud_id, "the older cloud keeps them"


def test_a_new_cloud_chooses_another_id_than_one_that_would_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = made(tmp_path / "other").keys().cloud_id
    free = uuid.uuid4()
    drawn = iter([uuid.UUID(same_names(other)), uuid.UUID(same_guests(other)), free])
    monkeypatch.setattr(uuid, "uuid4", lambda: next(drawn))
    place = made(tmp_path / "c")
    assert place.keys().cloud_id == root_records.cloud_id(place) == str(free)


def test_a_new_cloud_that_finds_no_id_says_why(tmp_path: Path, records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = made(tmp_path / "other").keys().cloud_id
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(same_names(other)))
    with pytest.raises(MicronovaError, match=f"No id .* in {records}"):
        made(tmp_path / "c")
    assert not StateDirectory(tmp_path / "c").has_keys()


@pytest.mark.parametrize("at", [(StateDirectory, "write"), (root_records, "_write")])
def test_a_new_cloud_that_is_interrupted_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: tuple[object, str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    made(tmp_path / "c")
    shutil.rmtree(tmp_path / "c")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*at, interrupted)
        made(tmp_path / "c")
    place = made(tmp_path / "c")
    assert root_records.cloud_id(place) == place.keys().cloud_id


def test_a_directory_that_is_made_anew_has_another_cloud(tmp_path: Path) -> None:
    before = root_records.cloud_id(made(tmp_path / "c"))
    shutil.rmtree(tmp_path / "c")
    assert root_records.cloud_id(made(tmp_path / "c")) != before


def test_records_of_directories_that_are_gone_are_forgotten(tmp_path: Path, records: Path) -> None:
    made(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    made(tmp_path / "b")
    assert len(list(records.iterdir())) == 1


def test_processes_that_start_together_get_one_user() -> None:
    """useradd looks before it takes its lock, and the second one changes the id of the user that the first one made."""
    name = f"mn-test-{uuid.uuid4().hex[:8]}"
    try:
        with ThreadPoolExecutor(4) as pool:
            found = set(pool.map(service_user.service_user, [name] * 4))
        entry = pwd.getpwnam(name)
        assert found == {service_user.ServiceUser(name, entry.pw_uid, entry.pw_gid)}
    finally:
        subprocess.run(["userdel", name], check=True)
