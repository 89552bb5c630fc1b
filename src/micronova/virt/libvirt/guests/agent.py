"""The QEMU guest agent: a program in the guest that does what the host asks for, if the guest's owner has installed it.

The image says that it has one (hw_qemu_guest_agent); only then the guest has the channel to it. A guest may answer
anything, or nothing: calls have a limit of time, and threads of their own (`Lane` of the connection), so that other
guests do not wait for it.
"""

from typing import Final

from micronova.objects.errors import Conflict, NotSupported
from micronova.objects.guest_properties import GuestProperties
from micronova.objects.orders import InstanceSpec
from micronova.virt.libvirt.client.binding import Domain
from micronova.virt.libvirt.client.library import has_code
from micronova.virt.libvirt.client.xmltree import parse

ANSWER_SECONDS: Final = 15
"""Seconds that an agent has for its answer; less than the time after which a call to libvirt counts as hung."""


CHANNEL: Final = "org.qemu.guest_agent.0"
"""The name of the channel in the guest's definition."""


def channel_state(domain: Domain) -> str | None:
    """Return "connected" if a program in the guest has opened the channel to the agent; None without a channel. Blocks.

    Without a program, the state is another one or not known.
    """
    for channel in parse(domain.XMLDesc(0)).iterfind("./devices/channel/target"):
        if channel.get("name") == CHANNEL:
            return channel.get("state", "")
    return None


def administrator(instance: InstanceSpec) -> str:
    """Return the name of the guest's administrator; raise Conflict if its image has no agent."""
    properties = GuestProperties(instance.flavor, instance.image)
    flag = "hw_qemu_guest_agent"
    if not properties.enabled(properties.image(flag), flag, default=False):
        raise Conflict(f"QEMU guest agent is not enabled: the image of the server needs {flag}=yes, and the agent.")
    windows = properties.image("os_type") == "windows"
    return properties.image("os_admin_user") or ("Administrator" if windows else "root")


def set_password(domain: Domain, user: str, password: str) -> None:
    """Set the password of a user of the guest. Blocks."""
    try:
        domain.agentSetResponseTimeout(ANSWER_SECONDS, 0)
        domain.setUserPassword(user, password, 0)
    except ValueError:  # the password has a character that libvirt cannot pass on
        raise Conflict("The password has a character that cannot be set.") from None
    except Exception as error:
        if has_code(error, "VIR_ERR_AGENT_UNRESPONSIVE", "VIR_ERR_AGENT_UNSYNCED"):
            raise NotSupported("The guest's agent does not answer: is it installed, and does it run?") from error
        if has_code(error, "VIR_ERR_OPERATION_INVALID"):
            raise Conflict("The guest does not run.") from error
        if has_code(error, "VIR_ERR_INTERNAL_ERROR", "VIR_ERR_AGENT_COMMAND_FAILED", "VIR_ERR_ARGUMENT_UNSUPPORTED"):
            raise Conflict(f"The guest's agent did not set the password of {user!r}.") from error
        raise
