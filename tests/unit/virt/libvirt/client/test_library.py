"""Errors of libvirt as errors of ours."""

import errno

import pytest

from micronova.objects.errors import Unavailable
from micronova.virt.driver import DriverFailed
from micronova.virt.libvirt.client.library import translated

libvirt = pytest.importorskip("libvirt")


def _error(code: str, number: int = 0) -> Exception:
    made = libvirt.libvirtError("it failed")
    made.err = (getattr(libvirt, code), 0, "it failed", 2, None, None, None, number, -1)
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("code", "number", "wanted"),
    [
        ("VIR_ERR_OPERATION_TIMEOUT", 0, Unavailable),
        ("VIR_ERR_NO_MEMORY", 0, Unavailable),
        ("VIR_ERR_SYSTEM_ERROR", errno.ENOSPC, Unavailable),
        ("VIR_ERR_SYSTEM_ERROR", errno.EMFILE, Unavailable),
        ("VIR_ERR_SYSTEM_ERROR", errno.ENOENT, DriverFailed),
        ("VIR_ERR_INTERNAL_ERROR", 0, DriverFailed),
    ],
)
def test_a_lack_of_the_hypervisor_is_temporary(code: str, number: int, wanted: type[Exception]) -> None:
    assert type(translated(_error(code, number), "start the guest")) is wanted
