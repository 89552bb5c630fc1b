"""Which control groups a private libvirtd uses: those of the machine, if it has them."""

import subprocess
from pathlib import Path

import pytest

from micronova.virt.libvirt.daemon.cgroups import DaemonGroup, hierarchies

V1 = """tmpfs {root} tmpfs rw 0 0
cgroup {root}/cpu,cpuacct cgroup rw,nosuid,cpu,cpuacct 0 0
cgroup {root}/memory cgroup rw,memory 0 0
cgroup {root}/freezer cgroup rw,freezer 0 0
cgroup {root}/systemd cgroup rw,xattr,name=systemd 0 0
cgroup2 {root}/unified cgroup2 rw 0 0
"""
V2 = "cgroup2 {root} cgroup2 rw,nosuid 0 0\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    names = "#subsys_name\thierarchy\ncpu\t1\ncpuacct\t1\nmemory\t2\nfreezer\t3\ndevices\t4\n"
    (tmp_path / "proc" / "cgroups").write_text(names)
    return tmp_path / "proc"


def machine(proc: Path, mounts: str) -> Path:
    root = proc.parent / "cgroup"
    (proc / "self" / "mounts").write_text(mounts.format(root=root))
    for line in mounts.format(root=root).splitlines():
        Path(line.split()[1]).mkdir(parents=True, exist_ok=True)
    return root


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Note attempts to join, which need a kernel's control groups."""
    seen: list[list[str]] = []

    def run(command: list[str], **_: object) -> None:
        seen.append(command)

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_the_first_version(proc: Path, tmp_path: Path, joined: list[list[str]]) -> None:
    root = machine(proc, V1)
    group = DaemonGroup(tmp_path / "libvirt", proc)
    assert not group.exists()
    group.make()
    assert group.exists()
    [name] = {path.name for path in root.glob("*/micronova-*")}
    members = [str(root / part / name / "cgroup.procs") for part in ("cpu,cpuacct", "memory")]
    assert group.join()[4:] == [*members, "--", "unshare", "--cgroup", "--"]
    assert joined == [[*group.join(), "true"]]
    assert [mount[:2] for mount in group.mounts[1:]] == [("cgroup", "cpu,cpuacct"), ("cgroup", "memory")]
    (root / "memory" / name / "machine" / "guest").mkdir(parents=True)
    group.remove()
    assert list(root.glob("*/micronova-*")) == [] and (root / "memory").is_dir()
    assert DaemonGroup(tmp_path / "other", proc).join() != group.join(), "each libvirtd has its own"


def test_groups_that_cannot_be_joined_are_not_used(proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(2, command)

    root = machine(proc, V1)
    monkeypatch.setattr(subprocess, "run", fail)
    group = DaemonGroup(tmp_path / "libvirt", proc)
    group.make()
    assert not group.exists() and list(root.glob("*/micronova-*")) == []


def test_the_second_version(proc: Path, tmp_path: Path, joined: list[list[str]]) -> None:
    root = machine(proc, V2)
    (root / "cgroup.subtree_control").write_text("cpuset cpu io memory pids\n")
    group = DaemonGroup(tmp_path / "libvirt", proc)
    assert group.mounts == [("cgroup2", "rw", "/sys/fs/cgroup")]
    group.make()
    [member] = joined[0][4:-5]
    assert member.startswith(f"{root}/micronova-") and group.exists()
    (root / "cgroup.subtree_control").write_text("cpu\n")
    assert hierarchies(proc) == [], "the machine's own groups are not changed in order to have controllers"


def test_a_machine_without(proc: Path, tmp_path: Path, joined: list[list[str]]) -> None:
    machine(proc, "tmpfs /tmp tmpfs rw 0 0\n")
    group = DaemonGroup(tmp_path / "libvirt", proc)
    group.make()
    assert not group.exists()
    group.remove()
