"""The sandbox of programs that read images: what a program that was taken over cannot do."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from micronova.virt.driver import DriverFailed
from micronova.virt.libvirt.storage import sandbox, tools

pytestmark = pytest.mark.skipif(sandbox.obstacle() is not None, reason=sandbox.obstacle() or "")

SECRET = "another tenant's"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("input", "other"):
        (tmp_path / name).write_text(SECRET)
    return tmp_path


async def do(folder: Path, *command: str) -> None:
    """Run a program as qemu-img is run, with one input and one output."""
    what = {"what": "do that", "folder": folder, "reads": [folder / "input"], "writes": folder / "output"}
    await tools.run(*command, file_limit=1 << 20, **what)  # type: ignore[arg-type]


def attempt(folder: Path, program: str) -> str:
    """Run a Python program in the sandbox, in place of a qemu-img that was taken over; return what it printed."""
    (folder / "output").touch()
    # Its own code is the system's, which programs may read; where it is elsewhere, it is given.
    own = [option for path in {sys.prefix, sys.base_prefix} for option in ("--read", path)]
    given = ["--read", str(folder / "input"), "--write", str(folder / "output"), *own]
    command = [sys.executable, "-I", "-S", sandbox.__file__, *given, "--", sys.executable, "-I", "-c", program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


async def test_it_reads_its_input_and_writes_its_output(folder: Path) -> None:
    await do(folder, "cp", str(folder / "input"), str(folder / "output"))
    assert (folder / "output").read_text() == SECRET
    assert (folder / "output").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "command",
    [
        ("cp", "other", "output"),
        ("cp", "/etc/passwd", "output"),
        ("cp", "input", "other"),
        ("cp", "input", "new"),
        ("ln", "other", "new"),
        ("mv", "other", "new"),
        ("rm", "-f", "other"),
        ("chmod", "777", "other"),
        ("truncate", "--no-create", "--size=0", "other"),
        ("ls", "."),
        ("unshare", "--user", "true"),
    ],
)
async def test_it_reaches_no_other_file(folder: Path, command: tuple[str, ...]) -> None:
    before = (folder / "other").stat().st_mode
    with pytest.raises(DriverFailed):
        await do(folder, *command)
    assert (folder / "other").read_text() == SECRET and (folder / "other").stat().st_mode == before
    assert not (folder / "new").exists() and (folder / "output").read_text() == ""


async def test_it_has_limits_and_sees_no_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICRONOVA_PASSWORD", SECRET)
    (folder / "input").write_bytes(bytes(2 << 20))
    with pytest.raises(DriverFailed):
        await do(folder, "cp", "--sparse=never", "input", "output")
    with pytest.raises(DriverFailed) as caught:
        await do(folder, "sh", "-c", "set; exit 1")
    assert "PATH=" in str(caught.value.details) and SECRET not in str(caught.value.details)


@pytest.mark.parametrize(
    "family, kind", [("AF_INET", "SOCK_STREAM"), ("AF_INET", "SOCK_DGRAM"), ("AF_UNIX", "SOCK_STREAM")]
)
def test_it_has_no_network_and_no_sockets(folder: Path, family: str, kind: str) -> None:
    said = attempt(folder, f"import socket; socket.socket(socket.{family}, socket.{kind}); print('made')")
    assert "PermissionError" in said and "made" not in said


def test_it_cannot_touch_other_processes(folder: Path) -> None:
    victim = subprocess.Popen(["sleep", "60"])
    try:
        for what in (
            f"os.kill({victim.pid}, 9)",
            f"open('/proc/{victim.pid}/environ').read()",
            f"resource.prlimit({victim.pid}, resource.RLIMIT_CPU, (1, 1))",
            f"os.setpriority(os.PRIO_PROCESS, {victim.pid}, 19)",
        ):
            said = attempt(folder, f"import os, resource; {what}; print('done')")
            assert "PermissionError" in said and "done" not in said, what
        assert victim.poll() is None
        said = attempt(folder, "import resource; print(resource.prlimit(0, resource.RLIMIT_CORE))")
        assert "Error" not in said, "its own limits it may see"
    finally:
        victim.kill()
        victim.wait()


def test_it_has_threads_and_children(folder: Path) -> None:
    threads = "import threading; t = threading.Thread(target=print, args=('ran',)); t.start(); t.join()"
    assert attempt(folder, threads) == "ran\n"
    assert attempt(folder, "import os; print(os.waitpid(os.fork() or os._exit(0), 0)[1])") == "0\n"


def test_an_open_socket_is_not_passed_on(folder: Path) -> None:
    with socket.socket() as mine:
        os.set_inheritable(mine.fileno(), False)
        said = attempt(folder, f"import os; os.fstat({mine.fileno()})")
    assert "Bad file descriptor" in said


def test_without_landlock_nothing_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> int:
        raise sandbox.Missing("this kernel has no Landlock")

    monkeypatch.setattr(sandbox, "_landlock_version", missing)
    assert sandbox.obstacle() == "this kernel has no Landlock"
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("the program was run"))
    child = os.fork()  # no_new_privs is for good
    if not child:
        os._exit(0 if sandbox.main(["--", "/bin/true"]) == sandbox.FAILED else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
