"""Makes the guest's file system: busybox, dropbear and its libraries, kernel modules, and our scripts (`guest/`)."""

import lzma
import re
import subprocess
from collections.abc import Iterable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from micronova.objects.errors import MicronovaError
from micronova.testimage.cpio import Archive

# In this order: buses and disks, network, config drive, power button, and others: virtio_console has the channel of the
# guest agent, and pvpanic tells the host of a panic.
MODULES = (
    *("virtio_pci", "virtio_blk", "virtio_scsi", "sd_mod", "sr_mod", "ata_piix"),
    *("virtio_net", "isofs", "nls_cp437", "nls_ascii", "vfat"),
    *("button", "evdev", "virtio_rng", "virtio_balloon", "virtio_console", "pvpanic_mmio"),
)
JOURNALLED = "ext4"
"""A file system for volumes. It is not loaded at the boot, for which no guest needs it."""
_LIBRARIES = "lib/x86_64-linux-gnu"
_LOADER = "lib64/ld-linux-x86-64.so.2"


def build(root: Path) -> bytes:
    """Return the archive, from unpacked packages."""
    archive = Archive()
    for directory in ("dev", "proc", "sys", "run", "tmp", "mnt", "var/log", "etc/dropbear"):
        archive.directory(directory)
    archive.directory("root/.ssh", 0o700)
    archive.link("var/run", "/run")
    archive.device("dev/console", 5, 1)
    _add_busybox(archive, root)
    _add_login(archive, root)
    _add_modules(archive, root)
    _add_scripts(archive, resources.files("micronova.testimage") / "guest", "")
    return archive.content()


def _find(root: Path, *names: str) -> Path:
    """Return the first that exists: Debian moves files from /bin to /usr/bin release by release."""
    for name in names:
        if (root / name).exists():
            return root / name
    raise MicronovaError(f"The test image cannot be built: no package brought {' or '.join(names)}.")


def _add_busybox(archive: Archive, root: Path) -> None:
    busybox = _find(root, "bin/busybox", "usr/bin/busybox")
    archive.file("bin/busybox", busybox.read_bytes(), 0o755)
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, timeout=30, check=True).stdout.split()
    for name in applets:
        if name != "busybox":
            archive.link(f"bin/{name}", "busybox")
    archive.link("sbin", "bin")


def _add_login(archive: Archive, root: Path) -> None:
    program = _find(root, "usr/sbin/dropbear", "sbin/dropbear")
    loader = _find(root, _LOADER, f"usr/{_LOADER}", f"{_LIBRARIES}/ld-linux-x86-64.so.2")
    places = f"{root}/usr/{_LIBRARIES}:{root}/{_LIBRARIES}"
    listed = subprocess.run(
        [loader, "--library-path", places, "--list", program], capture_output=True, text=True, timeout=30, check=False
    )
    if listed.returncode or "not found" in listed.stdout:
        raise MicronovaError(f"The test image cannot be built: dropbear lacks libraries: {listed.stdout.strip()}")
    archive.file("bin/dropbear", program.read_bytes(), 0o755)
    archive.file(_LOADER, loader.resolve().read_bytes(), 0o755)
    for name, path in re.findall(r"(\S+) => (\S+) \(", listed.stdout):
        if Path(path).name != loader.name:
            archive.file(f"{_LIBRARIES}/{name}", Path(path).read_bytes(), 0o755)


def _add_modules(archive: Archive, root: Path) -> None:
    places = {_module_name(path): path for path in root.glob("**/lib/modules/*/kernel/**/*.ko*")}
    contents: dict[str, bytes] = {}

    def add(name: str) -> None:
        """Add a module after what it depends on; a missing one is built into this kernel."""
        if name in contents or name not in places:
            return
        path = places[name]
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        contents[name] = b""  # ends the recursion if modules depend on each other
        found = re.search(rb"\0depends=([^\0]*)\0", content)
        for needed in found[1].decode().split(",") if found else ():
            add(needed.replace("-", "_"))
        del contents[name]
        contents[name] = content

    def listed(names: Iterable[str]) -> bytes:
        return "".join(f"/lib/modules/{name}.ko\n" for name in names).encode()

    for name in MODULES:
        add(name)
    archive.file("etc/guest/modules", listed(contents))
    loaded = set(contents)
    add(JOURNALLED)
    archive.file(f"etc/guest/modules-{JOURNALLED}", listed(name for name in contents if name not in loaded))
    for name, content in contents.items():
        archive.file(f"lib/modules/{name}.ko", content)


def _module_name(path: Path) -> str:
    return path.name.partition(".")[0].replace("-", "_")


def _add_scripts(archive: Archive, directory: Traversable, prefix: str) -> None:
    for each in sorted(directory.iterdir(), key=lambda entry: entry.name):
        if each.is_dir():
            _add_scripts(archive, each, f"{prefix}{each.name}/")
        else:
            content = each.read_bytes()
            archive.file(prefix + each.name, content, 0o755 if content.startswith(b"#!") else 0o644)
