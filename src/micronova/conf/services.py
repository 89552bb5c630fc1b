"""Settings of the other OpenStack services: where they are, and those of the embedded ones."""

from typing import Annotated

import msgspec
from msgspec import Meta


class IdentitySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The identity service and the service user."""

    auth_url: Annotated[
        str,
        Meta(
            description="URL of a Keystone (https://…/v3); empty: the embedded identity service. Set it if the "
            "identity service is another process or a real Keystone.",
            examples=["https://keystone.example/v3"],
        ),
    ] = ""
    username: Annotated[
        str,
        Meta(
            description="Service user that calls the other OpenStack services. The embedded identity service makes "
            "it. Change it if another identity service has another user for this, or to change its password "
            "while processes with the old one go on."
        ),
    ] = "micronova"
    password: Annotated[
        str,
        Meta(
            description="Password of the service user; empty: from state_path. Set it if the identity service is "
            "another process or a real Keystone.",
            examples=["SECRET"],
            extra={"secret": True},
        ),
    ] = ""
    project_name: Annotated[
        str, Meta(description="Project of the service user. Change it if the user has the role in another project.")
    ] = "service"
    user_domain_name: Annotated[
        str, Meta(description="Domain of the service user. Change it if the user is in another domain.")
    ] = "Default"
    project_domain_name: Annotated[
        str, Meta(description="Domain of the service user's project. Change it if the project is in another domain.")
    ] = "Default"
    region_name: Annotated[
        str,
        Meta(
            description="Region of this cloud; endpoints of other services are taken from this region of the "
            "catalog. Change it if the catalog has another name for this region.",
        ),
    ] = "RegionOne"
    token_cache_time: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that the validation of a token is cached. A revoked token is accepted for that "
            "long; 0: no cache. Lower it if revoked tokens must be refused sooner.",
        ),
    ] = 300.0
    token_lifetime: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that a token of the embedded identity service is valid. Lower it if stolen tokens "
            "are a concern, raise it for long uploads.",
        ),
    ] = 14400.0
    max_password_checks: Annotated[
        int,
        Meta(
            ge=1,
            description="Passwords that may wait to be checked by the embedded identity service; each check takes "
            "some 30 ms, and a further log-in gets 503. Raise it if many users log in at the same "
            "moment.",
        ),
    ] = 256
    public_key: Annotated[
        str,
        Meta(
            description="Hex digits of the keys (separated by spaces) that verify tokens of an embedded identity "
            "service in another process, without asking that service; `micronova token-key show` "
            "prints the keys. Tokens of other keys are asked about. Set it if the identity service is "
            "asked too often.",
            examples=["what `micronova token-key show` prints"],
        ),
    ] = ""


PublicEndpoint = Annotated[
    str,
    Meta(
        description="URL of the service for clients, in the catalog of an embedded identity service. Set it if clients "
        "reach the service by another URL than other services do, such as by a proxy. Empty: endpoint_override, or "
        "without it the URL of the identity service.",
        examples=["https://cloud.example/image"],
        extra={
            "examples": {
                "neutron": "https://cloud.example/network",
                "cinder": "https://cloud.example/volume/v3",
                "nova": "https://cloud.example/compute/v2.1",
                "placement": "https://cloud.example/placement",
            }
        },
    ),
]


class OtherService(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An OpenStack service besides compute."""

    endpoint_override: Annotated[
        str,
        Meta(
            description="URL of the service, for other services and hosts; empty: the embedded service in the same "
            "process, or without it the internal or public endpoint in the catalog. The catalog of an embedded "
            "identity service has this URL. Set it if the catalog does not have the service, or has another address "
            "than this process should use.",
            examples=["https://image.example:9292"],
            extra={
                "examples": {
                    "neutron": "https://network.example:9696",
                    "cinder": "https://volume.example:8776/v3",
                }
            },
        ),
    ] = ""
    public_endpoint: PublicEndpoint = ""


class GlanceSettings(OtherService, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The image service."""

    ticket_key: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            title="64 hex digits, as `openssl rand -hex 32` prints",
            description="Key of 64 hex digits that the embedded image service, the API and the conductors share if "
            "these are separate processes. Conductors sign the tickets by which hosts download and "
            "upload images. Empty: from state_path, if the image service runs in the same process; "
            "otherwise no tickets are issued. Set it if the image service is another process.",
            examples=["64 hex digits, as `openssl rand -hex 32` prints"],
            extra={"secret": True},
        ),
    ] = ""
    other_ticket_keys: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64}( [0-9a-f]{64})*)?$",
            title="keys of 64 hex digits, as `openssl rand -hex 32` prints, with spaces between",
            description="Further keys, separated by spaces, whose tickets the embedded image service accepts; nobody "
            "signs with them. Set it while glance.ticket_key is changed: first to the new key, then to the old one, "
            "as docs/operate.md says.",
            examples=["64 hex digits, as `openssl rand -hex 32` prints"],
            extra={"secret": True},
        ),
    ] = ""
    max_kernel_images_mb: Annotated[
        int,
        Meta(
            ge=1,
            description="MB that the kernel and the ramdisk of an image may have together. Hosts copy both for each "
            "server, and those of the rescue image for a rescue, beside the disks that flavors and claims count. Raise "
            "it if images need larger ones and hosts have the room.",
        ),
    ] = 512
    verify_glance_signatures: Annotated[
        bool,
        Meta(
            description="Whether hosts verify the signatures of all images that are downloaded. Servers cannot be "
            "made from images without a signature then. False: only images of servers with trusted "
            "certificates are verified. Set it to true if all images of the cloud are signed.",
        ),
    ] = False
    enable_certificate_validation: Annotated[
        bool,
        Meta(
            description="Whether the certificate of a signature has to be trusted, with verify_glance_signatures. "
            "False: only if a server names trusted certificates. Set it to true if only certain "
            "signers are trusted.",
        ),
    ] = False
    default_trusted_certificate_ids: Annotated[
        tuple[str, ...],
        Meta(
            description="Ids of the certificates that servers trust whose creators name none, with "
            "enable_certificate_validation. Set it if users should not have to name certificates.",
            examples=[["release-key"]],
        ),
    ] = ()
    certificate_directory: Annotated[
        str,
        Meta(
            description="Directory with certificates of signed images, in PEM or DER. The file ID.pem is the "
            "certificate with the id ID, for every user. The API and the embedded image service read "
            "it. Empty: certificates in state_path, if it exists. Set it if no key manager has the "
            "certificates.",
            examples=["/etc/micronova/certificates"],
        ),
    ] = ""


class BarbicanSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The key manager, which has certificates of signed images."""

    barbican_endpoint: Annotated[
        str,
        Meta(
            description="URL of a Barbican, without /v1; empty: the internal or public endpoint of the type "
            "key-manager in the catalog of a Keystone (identity.auth_url), if there is one. Set it if "
            "the catalog does not have the key manager.",
            examples=["https://barbican.example:9311"],
        ),
    ] = ""


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedded image service."""

    user_storage_quota: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of image data that a project may keep; an upload beyond that gets 413. 0: no limit. "
            "Raise it if projects need more images, lower it if the disk is small.",
        ),
    ] = 107_374_182_400
    image_size_cap: Annotated[
        int,
        Meta(
            ge=1, description="Bytes that one image may have; a larger upload gets 413. Lower it if the disk is small."
        ),
    ] = 1_099_511_627_776
    image_count_total: Annotated[
        int,
        Meta(
            ge=0,
            description="Images that a project may have, including those without data; creating one more gets 413. 0: "
            "no limit. Raise it if projects need more images.",
        ),
    ] = 1_000
    image_metadata_size_cap: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 20,
            description="Bytes that the names and values of the properties of one image may have together; more "
            "gets 413. Servers cannot be created from images with more than 65536. Lower it if users "
            "keep other data in properties.",
        ),
    ] = 65_536
    uploads_per_project: Annotated[
        int,
        Meta(
            ge=0,
            description="Uploads that a project may have under way at once; a further one gets 413. 0: no limit. "
            "Lower it if uploads of one project slow down others.",
        ),
    ] = 10


class ImageFormatSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checks of uploads to the embedded image service."""

    require_image_format_match: Annotated[
        bool,
        Meta(
            description="Whether the embedded image service refuses an upload that is unsafe, or whose content is "
            "not of the declared disk_format. Set it to false only if you trust all who upload images.",
        ),
    ] = True


class NeutronSettings(OtherService, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network service."""

    ticket_key: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            title="64 hex digits, as `openssl rand -hex 32` prints",
            description="Key of 64 hex digits that conductors, an embedded network service and the metadata "
            "service share. The keys of each compute host follow from this key; empty: from "
            "state_path. Set it if these roles run on several machines or in several directories.",
            examples=["64 hex digits, as `openssl rand -hex 32` prints"],
            extra={"secret": True},
        ),
    ] = ""
    other_ticket_keys: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64}( [0-9a-f]{64})*)?$",
            title="keys of 64 hex digits, as `openssl rand -hex 32` prints, with spaces between",
            description="Further keys, separated by spaces, whose host tickets the network and metadata services "
            "accept. Set it while neutron.ticket_key is changed: first to the new key, then to the old one, as "
            "docs/operate.md says.",
            examples=["64 hex digits, as `openssl rand -hex 32` prints"],
            extra={"secret": True},
        ),
    ] = ""
    metadata_proxy_shared_secret: Annotated[
        str,
        Meta(
            description="Secret that the metadata service shares with the proxies of a real Neutron; empty: only "
            "Micronova's agents are believed. Set it if a real Neutron passes metadata requests on.",
            examples=["SECRET"],
            extra={"secret": True},
        ),
    ] = ""
    metadata_url: Annotated[
        str,
        Meta(
            description="URL of the metadata service, for a network agent in another process; empty: the one in "
            "this process. Set it on hosts.",
            examples=["http://metadata.example:8775"],
        ),
    ] = ""


class VolumeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The embedded volume service."""

    default_volume_type: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=255,
            description="Name of the type of volumes for which no type is named; it is made at the start if it is "
            "missing. Change it if users expect another name.",
        ),
    ] = "__DEFAULT__"
    quota_volumes: Annotated[
        int,
        Meta(
            ge=-1, description="Volumes that a project may have; -1: no limit. Raise it if projects need more volumes."
        ),
    ] = 10
    quota_gigabytes: Annotated[
        int,
        Meta(
            ge=-1,
            description="GiB that the volumes and snapshots of a project may have; -1: no limit. Lower it if the "
            "disk is small.",
        ),
    ] = 1000
    quota_snapshots: Annotated[
        int,
        Meta(
            ge=-1,
            description="Snapshots that a project may have; -1: no limit. Raise it if projects need more snapshots.",
        ),
    ] = 10
    quota_backups: Annotated[
        int,
        Meta(
            ge=-1, description="Backups that a project may have; -1: no limit. Raise it if projects need more backups."
        ),
    ] = 10
    quota_backup_gigabytes: Annotated[
        int,
        Meta(
            ge=-1,
            description="GiB that the backups of a project may have; -1: no limit. Lower it if the disk is small.",
        ),
    ] = 1000
    per_volume_size_limit: Annotated[
        int, Meta(ge=-1, description="GiB that one volume may have; -1: no limit. Set it if the disk is small.")
    ] = -1


class PlacementSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Placement API, which the api role serves."""

    endpoint_override: Annotated[
        str,
        Meta(
            description="URL of the Placement API, for the catalog of an embedded identity service; empty: the URL of "
            "the identity service. Set it if the role api is another process.",
            examples=["http://api.example:8774/placement"],
        ),
    ] = ""
    public_endpoint: PublicEndpoint = ""

    policy_file: Annotated[
        str | None,
        Meta(
            description="Path of a policy.yaml with the rules that differ from the defaults. Set it if other roles "
            "than admin and service should use Placement.",
            examples=["/etc/micronova/placement-policy.yaml"],
        ),
    ] = None


class CinderSettings(OtherService, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The volume service."""

    service_type: Annotated[
        str,
        Meta(
            min_length=1,
            description="Type of the volume service in the catalog, if endpoint_override is empty. Change it if "
            "the catalog has another type, such as volumev3.",
        ),
    ] = "block-storage"
    creation_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that the build of a server waits for a volume that is made for this server. Raise "
            "it if volumes are made from large images.",
        ),
    ] = 600.0


class NovaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The compute service, as an embedded network service reaches it."""

    endpoint_override: Annotated[
        str,
        Meta(
            description="URL of the compute API to which the embedded network service sends events of ports; "
            "empty: the API in the same process, or without it the internal or public endpoint in the "
            "catalog. The catalog of an embedded identity service has this URL. Set it if the network service and the "
            "API are separate processes.",
            examples=["http://api.example:8774/compute/v2.1"],
        ),
    ] = ""
    public_endpoint: PublicEndpoint = ""


class SSLSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Certificates of the services that this process calls."""

    ca_file: Annotated[
        str,
        Meta(
            description="PEM file of the authorities that verify the certificates of other OpenStack services; empty: "
            "the authorities of the system. Set it if a private authority has signed these certificates, such as that "
            "of `micronova region init --tls`. The URLs of the broker and of PostgreSQL name such a file themselves.",
            examples=["/etc/micronova/tls/ca.pem"],
        ),
    ] = ""
