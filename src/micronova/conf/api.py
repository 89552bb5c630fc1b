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
            "every request and is for development. Change it only for development.",
        ),
    ] = "keystone"
    listen: Annotated[
        str,
        Meta(
            description="Address that the HTTP APIs listen on. Set it to 0.0.0.0 or to one address of this machine "
            "if clients on other machines use the APIs."
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="TCP port on which this process serves all its HTTP APIs; 0: a free one. Change it if "
            "another program has the port, or if several processes run on one machine.",
        ),
    ] = 8774
    workers: Annotated[
        int,
        Meta(
            ge=1,
            description="Worker processes that share the port of `micronova run` with HTTP roles. Raise it, up to one "
            "per CPU, if one process uses a whole CPU. A process with several roles has as many workers as the "
            "largest of api.workers, conductor.workers and scheduler.workers says of these, and each has all roles.",
        ),
    ] = 1
    public_url: Annotated[
        str | None,
        Meta(
            description="URL (scheme://host:port) of the APIs in links and in the catalog; default: what the "
            "client called. Set it behind a proxy.",
            examples=["https://cloud.example:8774"],
        ),
    ] = None
    trusted_proxies: Annotated[
        tuple[str, ...],
        Meta(
            description="Addresses and networks of proxies whose headers X-Forwarded-Proto, X-Forwarded-Host and "
            "X-Forwarded-For are believed. The same headers of other clients are ignored. Set it to "
            "the addresses of your proxies.",
        ),
    ] = ("127.0.0.1", "::1")
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections of all clients that a process serves at once. Further ones get 503, or are "
            "closed if the APIs speak HTTPS. Each takes some 20 KB and a file descriptor. Raise it if "
            "clients get 503 and the machine has memory left.",
        ),
    ] = 4096
    max_connections_per_client: Annotated[
        int,
        Meta(
            ge=1,
            description="Connections of one address, or of one IPv6 /64 network, that a process serves at once. "
            "Further ones get 429, or are closed if the APIs speak HTTPS. Connections of "
            "trusted_proxies are not counted. Raise it if many users come from one address.",
        ),
    ] = 512
    client_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that a client may take for the TLS handshake, to send the headers or the body of "
            "a request, that an upload may pause, and that an answer may stay unread. Raise it if "
            "clients have slow links.",
        ),
    ] = 60.0
    max_limit: Annotated[
        int,
        Meta(
            ge=1,
            description="Largest number of items in one page of a list of compute or network. Lower it if long "
            "lists take too long.",
        ),
    ] = 1000
    max_request_body_size: Annotated[
        int,
        Meta(
            ge=1024,
            description="Largest request body in bytes; uploads of images are not limited by it. Raise it if "
            "requests have large user data or injected files.",
        ),
    ] = 114688
    enable_instance_password: Annotated[
        bool,
        Meta(
            description="Whether the answers to create, rebuild, rescue and, up to 2.13, evacuate have the password of "
            "the server's administrator, which guests read from their config drive. Switch it off if images ignore it."
        ),
    ] = True
    policy_file: Annotated[
        str | None,
        Meta(
            description="Path of a policy.yaml with the rules that differ from the defaults. Set it if other roles "
            "than admin, member and reader should have rights.",
            examples=["/etc/micronova/policy.yaml"],
        ),
    ] = None
    required_extensions: Annotated[
        tuple[str, ...],
        Meta(
            description="Aliases of API extensions without which the API does not start. Other extensions that "
            "cannot be used are skipped. Name those that refuse requests, such as to delete protected "
            "servers.",
            examples=[["os-protect"]],
        ),
    ] = ()
    fault_injection: Annotated[
        bool,
        Meta(
            description="Whether admins may change the fault rules of the fake driver by the API, for tests. Set "
            "it to true in a cloud for tests."
        ),
    ] = False
    access_log: Annotated[
        bool,
        Meta(
            description="Whether each HTTP request has a line in the log, as http.access: client, method, path, "
            "status, bytes and milliseconds, without tokens. SIGHUP changes it at run time. Set it to true if no proxy "
            "in front of the APIs writes such a log.",
        ),
    ] = False
    metrics_listen: Annotated[
        str,
        Meta(
            description="ADDRESS:PORT at which `micronova run` serves Prometheus metrics at /metrics; empty: none. "
            "Of several workers, the first serves the metrics of its process at PORT, the second "
            "at PORT + 1, and so on. Set it if Prometheus watches this process.",
            examples=["127.0.0.1:9100"],
        ),
    ] = ""
    tls_certificate: Annotated[
        str | None,
        Meta(
            description="PEM file of the certificate of the HTTP APIs, with the certificates of intermediate "
            "authorities after it. With tls_key the APIs speak HTTPS. Set it if no proxy in front of "
            "the APIs has a certificate.",
            examples=["/etc/micronova/api.pem"],
        ),
    ] = None
    tls_key: Annotated[
        str | None,
        Meta(
            description="PEM file of the private key of tls_certificate. Set it with tls_certificate.",
            examples=["/etc/micronova/api.key"],
        ),
    ] = None
    cors_allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Web origins whose pages may call the APIs from a browser (CORS); `*`: all. Set it if a "
            "web page of another host calls the APIs.",
            examples=[["https://dashboard.example"]],
        ),
    ] = ()
    metadata_cache_expiration: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds that the metadata service caches the data of a server; 0: no cache. Lower it if "
            "guests must see changes sooner.",
        ),
    ] = 15.0
    vendordata_providers: Annotated[
        tuple[str, ...],
        Meta(
            description="Sources of vendor data for guests: StaticJSON, DynamicJSON. Change it if you have data of "
            "your own for guests."
        ),
    ] = ("StaticJSON",)
    vendordata_jsonfile_path: Annotated[
        str,
        Meta(
            description="JSON file whose content every guest gets (StaticJSON). Set it to give all guests the same "
            "data.",
            examples=["/etc/micronova/vendor.json"],
        ),
    ] = ""
    vendordata_dynamic_targets: Annotated[
        tuple[str, ...],
        Meta(
            description="NAME@URL of the services that are asked for the vendor data of each guest (DynamicJSON). "
            "Set it if a service of yours has data for each guest.",
            examples=[["join@https://vendordata.example/"]],
        ),
    ] = ()
    vendordata_dynamic_ssl_certfile: Annotated[
        str,
        Meta(
            description="PEM file of the authorities that verify the certificates of the services of "
            "vendordata_dynamic_targets; empty: the authorities of the system. Set it if a private "
            "authority signed these certificates.",
            examples=["/etc/micronova/ca.pem"],
        ),
    ] = ""
    vendordata_dynamic_connect_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds to connect to a service of vendordata_dynamic_targets. Raise it if the service is "
            "far away.",
        ),
    ] = 5.0
    vendordata_dynamic_read_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="Seconds that the answer of a service of vendordata_dynamic_targets may take. Raise it if "
            "the service is slow.",
        ),
    ] = 5.0
    vendordata_dynamic_failure_fatal: Annotated[
        bool,
        Meta(
            description="Whether a guest gets an error if a service of vendordata_dynamic_targets fails; else the "
            "part of the data that the service has is empty. Set it to true if guests must not run "
            "without this data."
        ),
    ] = False


class QuotaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Default limits of a project; -1 is no limit."""

    instances: Annotated[
        int,
        Meta(
            description="Servers of one project. Raise it if all projects need more servers; `openstack quota set` "
            "changes one project."
        ),
    ] = 10
    cores: Annotated[
        int,
        Meta(
            description="Virtual CPUs of all servers of one project. Raise it if all projects need more virtual "
            "CPUs; `openstack quota set` changes one project."
        ),
    ] = 20
    ram: Annotated[
        int,
        Meta(
            description="MiB of memory of all servers of one project. Raise it if all projects need more memory; "
            "`openstack quota set` changes one project."
        ),
    ] = 51200
    metadata_items: Annotated[
        int,
        Meta(
            description="Metadata items of one server. Raise it if all projects need more metadata; `openstack "
            "quota set` changes one project."
        ),
    ] = 128
    injected_files: Annotated[
        int,
        Meta(
            description="Files injected into one server. Raise it if all projects need more files; `openstack "
            "quota set` changes one project."
        ),
    ] = 5
    injected_file_content_bytes: Annotated[
        int, Meta(description="Bytes of one injected file. Raise it if all projects need larger files.")
    ] = 10240
    injected_file_path_length: Annotated[
        int, Meta(description="Characters of an injected file's path. Raise it if all projects need longer paths.")
    ] = 255
    key_pairs: Annotated[
        int,
        Meta(
            description="Key pairs of one user. Raise it if all projects need more key pairs; `openstack quota "
            "set` changes one project."
        ),
    ] = 100
    server_groups: Annotated[
        int,
        Meta(
            description="Server groups of one project. Raise it if all projects need more server groups; "
            "`openstack quota set` changes one project."
        ),
    ] = 10
    server_group_members: Annotated[
        int, Meta(description="Servers in one server group. Raise it if all projects need larger groups.")
    ] = 10

    def limits(self) -> dict[str, int]:
        """Return the limits by the names that the API and the database use: one setting has Nova's other name."""
        found = msgspec.structs.asdict(self)
        found["injected_file_path_bytes"] = found.pop("injected_file_path_length")
        return found
