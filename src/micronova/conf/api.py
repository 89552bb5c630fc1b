"""Settings of the HTTP APIs and of quotas."""

from typing import Annotated

import msgspec
from msgspec import Meta


class APISettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The compute API."""

    auth_strategy: Annotated[
        str,
        Meta(
            pattern="^(keystone|noauth2)$",
            description="How requests are authenticated: keystone by tokens; noauth2 believes "
            "every request and is for development.",
        ),
    ] = "keystone"
    listen: Annotated[str, Meta(description="Address that the HTTP APIs listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port of all HTTP APIs of a process; 0: a free one.")] = (
        8774
    )
    workers: Annotated[
        int,
        Meta(
            ge=1,
            description="Worker processes that share the port of `micronova run` with HTTP "
            "roles. One per CPU is a good number.",
        ),
    ] = 1
    public_url: Annotated[
        str | None,
        Meta(
            description="scheme://host:port in links and in the catalog. Set it behind a proxy; default: what the "
            "client called."
        ),
    ] = None
    trusted_proxies: Annotated[
        tuple[str, ...],
        Meta(
            description="Addresses and networks of proxies whose headers X-Forwarded-Proto, X-Forwarded-Host and "
            "X-Forwarded-For "
            "are believed. Those of all other clients are ignored."
        ),
    ] = ("127.0.0.1", "::1")
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections of all clients that a process serves at once. Further ones get 503, or are "
            "closed if the APIs speak HTTPS. Each takes some 20 KB and a file descriptor.",
        ),
    ] = 4096
    max_connections_per_client: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections of one address, or of one IPv6 /64 network, that a process serves at once. "
            "Further ones get 429, or are closed if the APIs speak HTTPS. Those of trusted_proxies are not counted.",
        ),
    ] = 512
    client_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that a client may take for the TLS handshake, to send the headers or the body of a "
            "request, that an upload may pause, and that an answer may stay unread.",
        ),
    ] = 60.0
    max_limit: Annotated[
        int, Meta(ge=1, description="Largest number of items in one page of a list of compute or network.")
    ] = 1000
    max_request_body_size: Annotated[
        int, Meta(ge=1024, description="Largest request body in bytes; uploads of images are not limited by it.")
    ] = 114688
    enable_instance_password: Annotated[
        bool,
        Meta(
            description="Whether the answers to create, rebuild, rescue and, up to 2.13, evacuate have the password of "
            "the server's administrator, which guests read from their config drive. Switch it off if images ignore it."
        ),
    ] = True
    policy_file: Annotated[
        str | None, Meta(description="Path of a policy.yaml with the rules that differ from the defaults.")
    ] = None
    required_extensions: Annotated[
        tuple[str, ...],
        Meta(
            description="Aliases of API extensions without which the API does not start. Other extensions that cannot "
            "be used are skipped. Name those that refuse requests, such as to delete protected servers."
        ),
    ] = ()
    fault_injection: Annotated[
        bool, Meta(description="Whether admins may change the fault rules of the fake driver by the API, for tests.")
    ] = False
    metrics_listen: Annotated[
        str,
        Meta(
            description="ADDRESS:PORT at which `micronova run` serves Prometheus metrics at /metrics; empty: none. "
            "Of several api.workers, the first serves its own at PORT, the second at PORT + 1, and so on."
        ),
    ] = ""
    tls_certificate: Annotated[
        str | None, Meta(description="PEM file of the certificate. With tls_key the APIs speak HTTPS.")
    ] = None
    tls_key: Annotated[str | None, Meta(description="PEM file of the certificate's private key.")] = None
    cors_allowed_origins: Annotated[
        tuple[str, ...], Meta(description="Web origins whose pages may call the APIs from a browser (CORS); `*`: all.")
    ] = ()
    metadata_cache_expiration: Annotated[
        float, Meta(ge=0, description="Seconds that the metadata service caches the data of a server; 0: no cache.")
    ] = 15.0
    vendordata_providers: Annotated[
        tuple[str, ...], Meta(description="Sources of vendor data for guests: StaticJSON, DynamicJSON.")
    ] = ("StaticJSON",)
    vendordata_jsonfile_path: Annotated[
        str, Meta(description="JSON file whose content every guest gets (StaticJSON).")
    ] = ""
    vendordata_dynamic_targets: Annotated[
        tuple[str, ...],
        Meta(description="NAME@URL of the services that are asked for the vendor data of each guest (DynamicJSON)."),
    ] = ()
    vendordata_dynamic_ssl_certfile: Annotated[
        str,
        Meta(
            description="PEM file of the authorities that verify the certificates of these services; empty: the "
            "system's."
        ),
    ] = ""
    vendordata_dynamic_connect_timeout: Annotated[
        float, Meta(gt=0, description="Seconds to connect to such a service.")
    ] = 5.0
    vendordata_dynamic_read_timeout: Annotated[
        float, Meta(gt=0, description="Seconds that the answer of such a service may take.")
    ] = 5.0
    vendordata_dynamic_failure_fatal: Annotated[
        bool,
        Meta(description="Whether a guest gets an error if such a service fails; else that part of its data is empty."),
    ] = False


class QuotaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Default limits of a project; -1 is no limit."""

    instances: Annotated[int, Meta(description="Servers of one project.")] = 10
    cores: Annotated[int, Meta(description="Virtual CPUs of all servers of one project.")] = 20
    ram: Annotated[int, Meta(description="MiB of memory of all servers of one project.")] = 51200
    metadata_items: Annotated[int, Meta(description="Metadata items of one server.")] = 128
    injected_files: Annotated[int, Meta(description="Files injected into one server.")] = 5
    injected_file_content_bytes: Annotated[int, Meta(description="Bytes of one injected file.")] = 10240
    injected_file_path_length: Annotated[int, Meta(description="Characters of an injected file's path.")] = 255
    key_pairs: Annotated[int, Meta(description="Key pairs of one user.")] = 100
    server_groups: Annotated[int, Meta(description="Server groups of one project.")] = 10
    server_group_members: Annotated[int, Meta(description="Servers in one server group.")] = 10

    def limits(self) -> dict[str, int]:
        """Return the limits by the names that the API and the database use: one setting has Nova's other name."""
        found = msgspec.structs.asdict(self)
        found["injected_file_path_bytes"] = found.pop("injected_file_path_length")
        return found
