"""The guest agent: whose password it sets, and who has none."""

import msgspec
import pytest

from micronova.objects.errors import Conflict
from micronova.virt.libvirt.guests.agent import administrator
from tests.unit.virt.libvirt.world import IMAGE, instance

AGENT = {"hw_qemu_guest_agent": "yes"}


@pytest.mark.parametrize(
    ("properties", "user"),
    [
        (AGENT, "root"),
        ({**AGENT, "os_type": "windows"}, "Administrator"),
        ({**AGENT, "os_type": "windows", "os_admin_user": "boss"}, "boss"),
    ],
)
def test_the_administrator(properties: dict[str, str], user: str) -> None:
    assert administrator(instance(image=msgspec.structs.replace(IMAGE, properties=properties))) == user


@pytest.mark.parametrize("properties", [{}, {"hw_qemu_guest_agent": "no"}])
def test_an_image_without_an_agent(properties: dict[str, str]) -> None:
    with pytest.raises(Conflict, match="hw_qemu_guest_agent=yes"):
        administrator(instance(image=msgspec.structs.replace(IMAGE, properties=properties)))
