"""A guest with metadata."""

import base64
from typing import Any

from micronova.metadata.facts import Facts
from micronova.objects.flavor import Flavor
from micronova.objects.image import ImageMeta
from micronova.objects.network import VIF, FixedIP
from micronova.objects.orders import InstanceSpec

UUID = "6b0c7f5e-9a63-4a0b-8f3c-5a7d0e1c2b3a"
KEY = "ssh-ed25519 AAAA me"
SCRIPT = b"#!/bin/sh\necho hello\n"


def vif(**changes: Any) -> VIF:
    known: dict[str, Any] = {
        "port_id": "00000001-1111-4222-8333-444444444444",
        "network_id": "net-1",
        "network_label": "private",
        "mac_address": "fa:16:3e:00:00:01",
        "fixed_ips": (FixedIP(address="10.0.0.1", subnet_id="sub-1"),),
        "vif_type": "bridge",
        "mtu": 1450,
        "subnets": ({"id": "sub-1", "cidr": "10.0.0.0/24", "ip_version": 4, "enable_dhcp": True},),
    }
    return VIF(**{**known, **changes})


def instance(**changes: Any) -> InstanceSpec:
    known: dict[str, Any] = {
        "uuid": UUID,
        "project_id": "project-1",
        "user_id": "user-1",
        "name": "Server 1",
        "hostname": "server-1",
        "flavor": Flavor(id="1", name="tiny", ram=256, vcpus=4, disk=1),
        "image": ImageMeta(id="0f6c3a8e-0000-4000-8000-000000000001"),
        "metadata": {"role": "web"},
        "key_name": "mine",
        "key_data": KEY,
        "user_data": base64.b64encode(SCRIPT).decode(),
        "availability_zone": "nova",
        "reservation_id": "r-1",
        "security_groups": ("default", "web"),
    }
    return InstanceSpec(**{**known, **changes})


def facts(vifs: tuple[VIF, ...] = (vif(),), **changes: Any) -> Facts:
    """Return a guest with everything that a guest can have; `changes` are to the instance."""
    return Facts(instance=instance(**changes), vifs=vifs)
