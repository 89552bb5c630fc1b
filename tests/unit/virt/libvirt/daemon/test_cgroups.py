"""Which control groups a private libvirtd uses: those of the machine, if it has them."""

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


def test_the_first_version(proc: Path, tmp_path: Path) -> None:
    root = machine(proc, V1)
    group = DaemonGroup(tmp_path / "libvirt", proc)
    assert not group.exists()
    group.make()
    assert group.exists()
    [name] = {path.name for path in root.glob("*/micronova-*")}
    assert group.members == [str(root / part / name / "cgroup.procs") for part in ("cpu,cpuacct", "memory")]
    assert [mount[:2] for mount in group.mounts[1:]] == [("cgroup", "cpu,cpuacct"), ("cgroup", "memory")]
    (root / "memory" / name / "machine" / "guest").mkdir(parents=True)
    group.remove()
    assert list(root.glob("*/micronova-*")) == [] and (root / "memory").is_dir()
    assert DaemonGroup(tmp_path / "other", proc).members != group.members, "each libvirtd has its own"


def test_the_second_version(proc: Path, tmp_path: Path) -> None:
    root = machine(proc, V2)
    (root / "cgroup.subtree_control").write_text("cpuset cpu io memory pids\n")
    group = DaemonGroup(tmp_path / "libvirt", proc)
    assert group.mounts == [("cgroup2", "rw", "/sys/fs/cgroup")]
    assert len(group.members) == 1 and group.members[0].startswith(f"{root}/micronova-")
    (root / "cgroup.subtree_control").write_text("cpu\n")
    assert hierarchies(proc) == [], "the machine's own groups are not changed in order to have controllers"


def test_a_machine_without(proc: Path, tmp_path: Path) -> None:
    machine(proc, "tmpfs /tmp tmpfs rw 0 0\n")
    group = DaemonGroup(tmp_path / "libvirt", proc)
    group.make()
    assert not group.exists() and group.members == []
    group.remove()
