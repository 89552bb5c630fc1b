"""tempest.conf for a cloud of ours, with every flag on that the cloud supports."""

import configparser
from pathlib import Path
from typing import Any

import yaml

from tests.certificates import Signer
from tests.osc import OpenStackClient

SIGNER = Signer()
CERTIFICATE = "tempest"
"""Who signs an image, and the id of the certificate."""

DISK = "/run/disk"
MOUNT_DISK = f"mkdir -p {DISK}; grep -q {DISK} /proc/mounts || mount -t vfat /dev/vda1 {DISK} || true"
"""The root of the test image is in memory: what tests write and look for in a snapshot has to be on its disk."""

FEATURES = {
    "attach_encrypted_volume": True,
    "swap_volume": True,
    "volume_backed_live_migration": True,
    "volume_multiattach": True,
    "vtpm_live_migration": False,  # needs Barbican
    "unified_limits": False,  # quotas are compute's own, not limits of the identity service
    "block_migration_for_live_migration": True,
    "can_migrate_between_any_hosts": True,
    "change_password": True,
    "cold_migration": True,
    "config_drive": True,
    "console_output": True,
    "disk_config": True,
    "enable_instance_password": True,
    "hostname_fqdn_sanitization": True,
    "ide_bus": True,
    "interface_attach": True,
    "live_migrate_back_and_forth": True,
    "live_migration": True,
    "metadata_service": True,
    "pause": True,
    "personality": True,
    "rescue": True,
    "resize": True,
    "serial_console": True,
    "shelve": True,
    "shelve_migrate": True,
    "snapshot": True,
    "spice_console": True,
    "stable_rescue": True,
    "suspend": True,
    "vnc_console": True,
}
"""`[compute-feature-enabled]`. On one host with real guests `for_real_guests` switches off what needs two."""

NEEDS_TWO_HOSTS = (
    "block_migration_for_live_migration",
    "can_migrate_between_any_hosts",
    "cold_migration",
    "live_migrate_back_and_forth",
    "live_migration",
    "shelve_migrate",
)


def write(directory: Path, clouds: Path, *, hosts: int, real_guests: bool, any_format: bool) -> Path:
    """Make what Tempest takes for granted in a cloud, and write tempest.conf; return its path.

    With `any_format` the cloud takes images whose data has another format than they say.
    """
    client = OpenStackClient(clouds)
    try:
        sections = _sections(client, clouds, hosts=hosts, real_guests=real_guests, any_format=any_format)
    finally:
        client.close()
    parser = configparser.RawConfigParser()
    for name, options in sections.items():
        parser[name] = {option: str(value) for option, value in options.items()}
    parser["oslo_concurrency"] = {"lock_path": str(directory / "locks")}
    parser["DEFAULT"] = {"log_file": str(directory / "tempest.log"), "use_stderr": "false"}
    path = directory / "etc" / "tempest.conf"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as stream:
        parser.write(stream)
    return path


def _sections(
    client: OpenStackClient, clouds: Path, *, hosts: int, real_guests: bool, any_format: bool
) -> dict[str, dict[str, object]]:
    auth = yaml.safe_load(clouds.read_text())["clouds"]["micronova"]["auth"]
    [image] = client.column("image list", "--name", "test-image", name="ID")
    other_image, signed_image = _more_images(client, clouds.parent, image)
    memory = 128 if real_guests else 64
    flavors = [
        client.json(
            "flavor create", f"tempest.{size}", "--ram", str(memory * size), "--vcpus", "1", "--disk", str(size)
        )
        for size in (1, 2)
    ]
    public = client.json("network show", "public")
    client("network set", "--no-share", "private")  # with a network for all, no project gets one allocated by itself
    shared = client.json("volume type create", "tempest-multiattach", "--property", "multiattach=<is> True")
    extensions = ",".join(client.column("extension list", "--network", name="Alias"))
    features = {name: on and (hosts > 1 or name not in NEEDS_TWO_HOSTS) for name, on in FEATURES.items()}
    return {
        "auth": {
            "admin_username": auth["username"],
            "admin_password": auth["password"],
            "admin_project_name": auth["project_name"],
            "admin_domain_name": "Default",
            "use_dynamic_credentials": True,
            "create_isolated_networks": True,
        },
        "identity": {"uri_v3": auth["auth_url"], "auth_version": "v3", "region": "RegionOne"},
        "identity-feature-enabled": {"application_credentials": True, "project_tags": True},
        "compute": {
            "image_ref": image,
            "image_ref_alt": other_image,
            "certified_image_ref": signed_image,
            "certified_image_trusted_certs": CERTIFICATE,
            "flavor_ref": flavors[0]["id"],
            "flavor_ref_alt": flavors[1]["id"],
            "min_compute_nodes": hosts,
            "max_microversion": "latest",
            "build_interval": 1,
            "hypervisor_type": "QEMU" if real_guests else "fake",
        },
        "compute-feature-enabled": {
            **features,
            "scheduler_enabled_filters": "all",  # that Tempest knows
            "nova_policy_roles": "admin,manager,member,reader,service",
        },
        "network": {
            "public_network_id": public["id"],
            "floating_network_name": "public",
            "project_network_cidr": "10.100.0.0/16",
            "build_interval": 1,
        },
        "network-feature-enabled": {
            "api_extensions": extensions,
            "ipv6": True,
            "ipv6_subnet_attributes": True,
            "port_security": True,
        },
        "image-feature-enabled": {
            "import_image": True,
            "os_glance_reserved": True,
            "do_secure_hash": True,
            "image_format_enforcement": not any_format,
        },
        # Policy refuses tokens with another scope, and has no rules of old: tests that only read do so as readers.
        "enforce_scope": {"nova": True, "neutron": True, "glance": True, "cinder": True},
        "validation": {
            "run_validation": real_guests,
            "image_ssh_user": "root",
            "connect_method": "floating",
            "auth_method": "keypair",
            "ssh_key_type": "ecdsa",
            "network_for_ssh": "public",
            "ssh_shell_prologue": f"set -eu -o pipefail; PATH=$$PATH:/sbin:/usr/sbin; {MOUNT_DISK};",
        },
        "scenario": {"target_dir": DISK},
        "volume": {
            "max_microversion": "latest",
            "catalog_type": "block-storage",
            "build_interval": 1,
            "storage_protocol": "nbd",
            "vendor_name": "Micronova",
            "disk_format": "raw",
            "volume_type_multiattach": shared["name"],
        },
        "volume-feature-enabled": {
            "backup": True,
            "volume_revert": True,
            "volume_locked_by_snapshot": False,
            "extend_attached_volume": True,
        },
        "service_available": {
            "nova": True,
            "neutron": True,
            "glance": True,
            "cinder": True,
            "swift": False,
            "horizon": False,
        },
    }


def _more_images(client: OpenStackClient, directory: Path, image: str) -> tuple[str, str]:
    """Upload the test image twice more: Tempest wants two images, and one that is signed."""
    file = directory / "image-of-tempest"
    shown: dict[str, Any] = client.json("image show", image)
    client("image save", "--file", str(file), image)
    (directory / "certificates").mkdir()
    (directory / "certificates" / f"{CERTIFICATE}.pem").write_bytes(SIGNER.pem)
    signature = [
        option
        for name, value in SIGNER.properties(file.read_bytes(), CERTIFICATE).items()
        for option in ("--property", f"{name}={value}")
    ]
    made = [
        client.json(
            "image create", "--file", str(file), "--public", "--disk-format", shown["disk_format"],
            "--container-format", shown["container_format"], *options, name,
        )
        for name, options in (("tempest-other", ()), ("tempest-signed", signature))
    ]  # fmt: skip
    file.unlink()
    return str(made[0]["id"]), str(made[1]["id"])
