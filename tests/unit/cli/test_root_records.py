"""Root's records of which cloud a directory has: the service user cannot make root work on another cloud."""

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from micronova.cli import root_records
from micronova.cli.state import StateDirectory
from micronova.objects.errors import MicronovaError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root keeps records")


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(root_records, "RECORDS", tmp_path / "records")
    return tmp_path / "records"


def made(path: Path) -> StateDirectory:
    place = StateDirectory(path)
    place.create()
    root_records.cloud_id(place, new=not place.has_keys())
    return place


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


def test_so_is_one_that_gives_the_same_names(tmp_path: Path) -> None:
    victim, place = made(tmp_path / "victim"), StateDirectory(tmp_path / "c")
    place.create()
    other = victim.keys().cloud_id
    names(place, f"{other[:-4]}0000" if not other.endswith("0000") else f"{other[:-4]}1111")
    for new in (True, False):
        with pytest.raises(MicronovaError, match=f"has the id of the cloud in {victim.path}"):
            root_records.cloud_id(place, new=new)


def test_so_is_one_whose_guests_would_have_the_same_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = made(tmp_path / "victim")
    made(tmp_path / "fine")
    monkeypatch.setattr(root_records, "guest_ids", lambda ids, cloud: range(70_000, 74_096))
    with pytest.raises(MicronovaError, match=f"user ids of those of {tmp_path}"):
        made(tmp_path / "c")
    assert root_records.cloud_id(victim) == victim.keys().cloud_id, "a cloud that has them already keeps them"


def test_a_directory_that_is_made_anew_has_another_cloud(tmp_path: Path) -> None:
    before = root_records.cloud_id(made(tmp_path / "c"))
    shutil.rmtree(tmp_path / "c")
    assert root_records.cloud_id(made(tmp_path / "c")) != before


def test_records_of_directories_that_are_gone_are_forgotten(tmp_path: Path, records: Path) -> None:
    made(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    made(tmp_path / "b")
    assert len(list(records.iterdir())) == 1
