"""The sandbox of programs that read images: what a program that was taken over cannot do."""

import contextlib
import os
import signal
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


async def do(folder: Path, *command: str, cpu_limit: int = tools.CPU_SECONDS) -> None:
    """Run a program as qemu-img is run, with one input and one output."""
    what = {"what": "do that", "folder": folder, "reads": [folder / "input"], "writes": folder / "output"}
    await tools.run(*command, file_limit=1 << 20, cpu_limit=cpu_limit, **what)  # type: ignore[arg-type]


# As on kernels before 6.12, whose Landlock does not govern signals: only seccomp can.
_WITHOUT_SCOPES = """
import runpy, sys
main = runpy.run_path(sys.argv[1])["main"]
main.__globals__["_landlock_version"] = lambda: 5
sys.exit(main(sys.argv[2:]))
"""


def attempt(folder: Path, program: str, *, scopes: bool = True) -> str:
    """Run a Python program in the sandbox, in place of a qemu-img that was taken over; return what it printed."""
    (folder / "output").touch()
    # Its own code is the system's, which programs may read; where it is elsewhere, it is given.
    own = [option for path in {sys.prefix, sys.base_prefix} for option in ("--read", path)]
    given = ["--read", str(folder / "input"), "--write", str(folder / "output"), *own]
    start = ["-S", sandbox.__file__] if scopes else ["-c", _WITHOUT_SCOPES, sandbox.__file__]
    command = [sys.executable, "-I", *start, *given, "--", sys.executable, "-I", "-c", program]
    # Under coverage such a program would want to write what it has measured, which the sandbox forbids.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=env)
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


async def test_the_end_of_what_it_says_is_kept(folder: Path) -> None:
    """A program that a hostile image has taken over says gigabytes."""
    with pytest.raises(DriverFailed) as caught:
        await do(folder, "yes", "x" * 99)
    assert "ended with -9" in str(caught.value.details["details"])
    assert len(str(caught.value.details["details"])) < tools.MOST_OUTPUT + 100
    with pytest.raises(DriverFailed) as caught:
        await do(folder, "bash", "-c", "printf '%50000s' begin; echo; echo the reason; exit 1")
    assert str(caught.value.details["details"]).endswith("begin\nthe reason")


async def test_it_has_limits_and_sees_no_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICRONOVA_PASSWORD", SECRET)
    (folder / "input").write_bytes(bytes(2 << 20))
    with pytest.raises(DriverFailed):
        await do(folder, "cp", "--sparse=never", "input", "output")
    with pytest.raises(DriverFailed) as caught:
        await do(folder, "sh", "-c", "set; exit 1")
    assert "PATH=" in str(caught.value.details) and SECRET not in str(caught.value.details)
    with pytest.raises(DriverFailed) as caught:
        await do(folder, "bash", "-c", "ulimit -u; exit 1")
    assert int(str(caught.value.details["details"]).split()[-1]) <= tools.MOST_THREADS


@pytest.mark.parametrize(
    "family, kind", [("AF_INET", "SOCK_STREAM"), ("AF_INET", "SOCK_DGRAM"), ("AF_UNIX", "SOCK_STREAM")]
)
def test_it_has_no_network_and_no_sockets(folder: Path, family: str, kind: str) -> None:
    said = attempt(folder, f"import socket; socket.socket(socket.{family}, socket.{kind}); print('made')")
    assert "PermissionError" in said and "made" not in said


def call(name: str, *arguments: object) -> str:
    """Return a program that makes a system call and prints that it was done, or fails as Python does."""
    number = {"x86_64": {"tgkill": 234}, "aarch64": {"tgkill": 131}}[os.uname().machine][name]
    given = ", ".join(map(str, arguments))
    return f"if libc.syscall({number}, {given}): raise OSError(ctypes.get_errno(), {name!r})"


_SIGNALLED_PIPE = """
r, w = os.pipe()
fcntl.fcntl(r, {setowner})
fcntl.fcntl(r, 10, 9)  # F_SETSIG
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)
os.write(w, b"x")
"""


@pytest.mark.parametrize("scopes", [True, False])
@pytest.mark.parametrize(
    "what",
    [
        "os.kill({pid}, 9)",
        call("tgkill", "{pid}", "{pid}", 9),
        _SIGNALLED_PIPE.replace("{setowner}", "fcntl.F_SETOWN, {pid}"),
        _SIGNALLED_PIPE.replace("{setowner}", "15, struct.pack('ii', 1, {pid})"),  # F_SETOWN_EX
        "open('/proc/{pid}/environ').read()",
        "resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1))",
        "os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
        "os.sched_setscheduler({pid}, os.SCHED_IDLE, os.sched_param(0))",
        "os.sched_setaffinity({pid}, [0])",
        "os.sched_setparam({pid}, os.sched_param(0))",
    ],
)
def test_it_cannot_touch_other_processes(folder: Path, what: str, scopes: bool) -> None:
    victim = subprocess.Popen(["sleep", "60"])
    try:
        program = "import ctypes, fcntl, os, resource, struct\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        said = attempt(folder, f"{program}{what.format(pid=victim.pid)}\nprint('done')", scopes=scopes)
        assert "PermissionError" in said and "done" not in said
    finally:
        victim.terminate()
        assert victim.wait() == -signal.SIGTERM, "it was killed before"


def test_it_may_see_its_own_limits_and_abort(folder: Path) -> None:
    assert "Error" not in attempt(folder, "import resource; print(resource.prlimit(0, resource.RLIMIT_CORE))")
    ended = "import os, signal\nsignal.signal(6, lambda *_: print('signalled'))\nsignal.raise_signal(6)"
    assert attempt(folder, ended) == "signalled\n"


def test_it_has_threads_and_no_children(folder: Path) -> None:
    threads = "import threading; t = threading.Thread(target=print, args=('ran',)); t.start(); t.join()"
    assert attempt(folder, threads) == "ran\n"
    for what in ("os.fork()", "os.posix_spawn('/bin/true', ['true'], {})", "libc.vfork() < 0 and os.fork()"):
        said = attempt(folder, f"import ctypes, os; libc = ctypes.CDLL(None); {what}; print('made')")
        assert "PermissionError" in said and "made" not in said


async def test_it_leaves_no_process_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "SECONDS_PER_CPU_SECOND", 0.5)
    with pytest.raises(DriverFailed):
        await do(folder, "sh", "-c", f"sleep {os.getpid()}.5 & wait", cpu_limit=1)
    assert not _running(f"sleep {os.getpid()}.5")


def _running(command: str) -> list[str]:
    wanted = command.replace(" ", "\0").encode() + b"\0"
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if file.read_bytes() == wanted:
                found.append(file.parent.name)
                os.kill(int(file.parent.name), signal.SIGKILL)
    return found


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
