"""The user that a private libvirtd probes QEMU as."""

import pwd

import pytest

from micronova.virt.libvirt.client.library import LibvirtMissing
from micronova.virt.libvirt.daemon.qemu_user import find_qemu_user


def test_qemu_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(name: str) -> object:
        raise KeyError(name)

    monkeypatch.setattr(pwd, "getpwnam", nobody)
    with pytest.raises(LibvirtMissing, match="install libvirt-daemon-system"):
        find_qemu_user()
