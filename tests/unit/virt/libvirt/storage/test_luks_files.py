"""Making the files of encrypted volumes with the host's `qemu-img`."""

from pathlib import Path
from typing import Any

import pytest

from micronova.objects.errors import Unavailable
from micronova.virt.driver import DriverFailed
from micronova.virt.libvirt.storage import sandbox, tools

CIPHER = "cipher-alg=aes-256,cipher-mode=xts,ivgen-alg=plain64,hash-alg=sha256"
NOT_MEASURED = "qemu-img ended with 1: qemu-img: a.part: Unable to get accurate CPU usage"


def fail_first(monkeypatch: pytest.MonkeyPatch, times: float, said: str) -> list[str]:
    """Let the first runs of programs fail; return the list to which each run adds its program."""
    real, seen = tools.run, []

    async def run(*command: str, **options: Any) -> None:
        seen.append(command[0])
        if len(seen) <= times:
            raise DriverFailed("The host could not do that.", details=said)
        await real(*command, **options)

    monkeypatch.setattr(tools, "run", run)
    return seen


@pytest.mark.skipif(sandbox.obstacle() is not None, reason=sandbox.obstacle() or "")
async def test_a_key_whose_cost_was_not_measured_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QEMU fails by chance where kernels count CPU time in ticks: one volume of eight, seen on an idle machine."""
    fail_first(monkeypatch, 2, NOT_MEASURED)
    await tools.create_luks(tmp_path / "volume", 1 << 20, CIPHER, "passphrase")
    assert (tmp_path / "volume").read_bytes()[:6] == b"LUKS\xba\xbe"


async def test_a_cost_that_is_never_measured_is_a_lack_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_first(monkeypatch, float("inf"), NOT_MEASURED)
    with pytest.raises(Unavailable, match="just now"):
        await tools.create_luks(tmp_path / "volume", 1 << 20, CIPHER, "passphrase")


async def test_another_failure_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fail_first(monkeypatch, float("inf"), "qemu-img ended with 1: it broke")
    with pytest.raises(DriverFailed):
        await tools.create_luks(tmp_path / "volume", 1 << 20, CIPHER, "passphrase")
    assert seen == ["qemu-img"]
