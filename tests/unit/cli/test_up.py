"""`micronova up --detach` as root, in a directory that the service user can change."""

import os
import sys
from pathlib import Path
from shlex import quote

import pytest

from micronova.cli import up
from micronova.cli.state import StateDirectory
from micronova.objects.errors import MicronovaError


@pytest.mark.parametrize(("says", "reason"), [("micronova: no disk", "no disk"), ("", "The cloud did not start.")])
def test_the_reason_is_read_from_the_log_that_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, reason: str
) -> None:
    place = StateDirectory(tmp_path / "cloud")
    place.create()
    secret, log = tmp_path / "secret", place.path / "micronova.log"
    secret.write_text("root's secret\n")
    log.write_text("an earlier start\n")
    script = f"printf %s {quote(says)} >&2; rm {quote(str(log))}; ln -s {quote(str(secret))} {quote(str(log))}; exit 1"
    monkeypatch.setattr(up, "own_command", lambda *_: ["sh", "-c", script])
    with pytest.raises(MicronovaError) as raised:
        up._detach(place, [])
    assert raised.value.message == reason


def test_a_reason_is_looked_for_at_the_end_of_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = StateDirectory(tmp_path / "cloud")
    place.create()
    log = place.path / "micronova.log"
    log.write_text("an earlier start\n" * 100)
    long = "import sys; print('x' * 10_000_000, file=sys.stderr); sys.exit('the reason')"
    monkeypatch.setattr(up, "own_command", lambda *_: [sys.executable, "-c", long])
    with pytest.raises(MicronovaError, match=r"^the reason$"):
        up._detach(place, [])
    # The cloud keeps its log below a size, so that it may be shorter than it was before.
    cut = f"import os, sys; os.truncate({str(log)!r}, 0); sys.exit('the reason')"
    monkeypatch.setattr(up, "own_command", lambda *_: [sys.executable, "-c", cut])
    with pytest.raises(MicronovaError, match=r"^the reason$"):
        up._detach(place, [])
    silent = "import sys; print('x' * 10_000_000, end='', file=sys.stderr); sys.exit(1)"
    monkeypatch.setattr(up, "own_command", lambda *_: [sys.executable, "-c", silent])
    with pytest.raises(MicronovaError) as raised:
        up._detach(place, [])
    assert len(raised.value.message) <= up.MOST_READ


def test_the_cloud_can_append_to_its_log_and_not_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = StateDirectory(tmp_path / "cloud")
    place.create()
    (place.path / "micronova.log").write_text("of an earlier start\n")
    # Standard error is inherited by the agents, who are another user.
    program = "import fcntl, sys; sys.exit(str(fcntl.fcntl(2, fcntl.F_GETFL)))"
    monkeypatch.setattr(up, "own_command", lambda *_: [sys.executable, "-c", program])
    with pytest.raises(MicronovaError) as raised:
        up._detach(place, [])
    flags = int(raised.value.message)
    assert flags & os.O_ACCMODE == os.O_WRONLY and flags & os.O_APPEND
