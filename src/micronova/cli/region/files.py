"""The texts that `region init` writes: settings, environments, SQL, commands for the broker, a proxy's settings."""

import secrets
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from micronova.cli.region.plan import PATHS, RegionPlan, is_name
from micronova.cli.state import new_password

USER = "micronova"
"""The user of the database and of the broker, and the service user."""


@dataclass(frozen=True)
class RegionSecrets:
    """The secrets of a new region."""

    secret_key: str = field(default_factory=lambda: secrets.token_hex(32))
    image_key: str = field(default_factory=lambda: secrets.token_hex(32))
    network_key: str = field(default_factory=lambda: secrets.token_hex(32))
    database: str = field(default_factory=new_password)
    broker: str = field(default_factory=new_password)
    service: str = field(default_factory=new_password)


def control_settings(plan: RegionPlan, secret: RegionSecrets) -> str:
    """Return the settings that all processes of the control node share."""
    scheme, tls, query, ssl = "amqp", "", "", ""
    authority = plan.config_directory / "tls" / "ca.pem"
    if plan.tls:
        scheme, tls = "amqps", f"?cafile={authority}"
        query = f"?sslmode=verify-full&sslrootcert={authority}"
        ssl = f"""tls_certificate = "{plan.config_directory / "tls" / "certificate.pem"}"
tls_key = "{plan.config_directory / "tls" / "key.pem"}"
"""
    text = f"""# The settings that all processes of the control nodes share. Each process has more in its NAME.env.
# `micronova config` lists every setting with its meaning and default.

[default]
transport_url = "{scheme}://{USER}:{secret.broker}@{",".join(plan.brokers)}/{tls}"
# Broker users that may give orders. Each compute host has a broker user of its own, which may only report.
control_users = ["{USER}"]
# Encrypts the passwords of builds that wait, credentials of users and keys of volumes: the same in all processes.
secret_key = "{secret.secret_key}"

[database]
connection = "postgresql://{USER}:{secret.database}@{plan.database_place}/{USER}{query}"

[api]
listen = "{plan.listen}"
{ssl}
[conductor]
require_host_users = true

[identity]
auth_url = "{plan.url("identity")}"
username = "{USER}"
password = "{secret.service}"
region_name = "{plan.region_name}"

# Where each service is: for the other services, for hosts, and in the catalog.
[glance]
endpoint_override = "{plan.url("image")}"
{_public(plan, "image")}ticket_key = "{secret.image_key}"

[neutron]
endpoint_override = "{plan.url("network")}"
{_public(plan, "network")}metadata_url = "{plan.url("metadata")}"
ticket_key = "{secret.network_key}"

[cinder]
endpoint_override = "{plan.url("volume")}"
{_public(plan, "volume")}
[nova]
endpoint_override = "{plan.url("compute")}"
{_public(plan, "compute")}
[placement]
endpoint_override = "{plan.url("placement")}"
{_public(plan, "placement")}
# The console proxy: links lead there.
[vnc]
novncproxy_base_url = "{plan.seen_by_clients("console")}/vnc_lite.html"

[spice]
html5proxy_base_url = "{plan.seen_by_clients("console")}/spice_auto.html"

[serial_console]
base_url = "{plan.seen_by_clients("console")}/serial.html"
"""
    if plan.tls:
        text += f"""
# The authority that signed the certificates of all services, of the broker and of the database.
[ssl]
ca_file = "{authority}"
"""
    return text


def _public(plan: RegionPlan, service: str) -> str:
    """Return the line with the URL of clients, if it differs from that of other services."""
    return f'public_endpoint = "{plan.seen_by_clients(service)}"\n' if plan.public_url else ""


def environment(plan: RegionPlan, process: str) -> dict[str, str]:
    """Return what a process has of its own, as environment variables."""
    role = plan.processes[process]
    found = {"ROLES": role, "MICRONOVA__DEFAULT__HOST": process}
    if plan.serves_http(process):
        found["MICRONOVA__API__PORT"] = str(plan.port(role))
        found["MICRONOVA__API__PUBLIC_URL"] = plan.public_url or plan.process_url(role)
    return found


def sql(secret: RegionSecrets) -> str:
    """Return the statements that make the role and the database."""
    return f"""-- For an administrator of PostgreSQL: psql --set ON_ERROR_STOP=1 --file postgresql.sql
CREATE ROLE {USER} LOGIN PASSWORD '{secret.database}';
CREATE DATABASE {USER} OWNER {USER} ENCODING 'UTF8' TEMPLATE template0;
"""


def broker_commands(secret: RegionSecrets) -> str:
    """Return the commands that make the broker's user; `micronova host add` prints those for a host."""
    return f"""#!/bin/sh
# On a broker, as root: sh broker.sh. The user that everybody knows is deleted.
set -e
echo {secret.broker} | rabbitmqctl add_user {USER}
rabbitmqctl set_permissions -p / {USER} '.*' '.*' '.*'
rabbitmqctl delete_user guest
"""


def proxy(plan: RegionPlan) -> str:
    """Return an example for nginx: one name and one port in front of all services."""
    name = urlsplit(plan.public_url).hostname or "cloud.example"
    scheme = "https" if plan.tls else "http"
    verify = ""
    if plan.tls:
        # nginx finds no addresses in a certificate, only names; each certificate of `init` has this one, too.
        verified = plan.address if is_name(plan.address) else "localhost"
        verify = f"""
    proxy_ssl_verify on;
    proxy_ssl_trusted_certificate {plan.config_directory / "tls" / "ca.pem"};
    proxy_ssl_name {verified};"""
    text = f"""# An example for nginx (/etc/nginx/sites-enabled): one name and one port in front of all services.
# Let `micronova region init` know its URL: --public-url https://{name}. If nginx runs on another machine than the
# services, name its address in api.trusted_proxies of micronova.toml.
map $http_upgrade $connection_upgrade {{
    default upgrade;
    ''      close;
}}

server {{
    listen 443 ssl;
    server_name {name};
    ssl_certificate     /etc/ssl/micronova/certificate.pem;
    ssl_certificate_key /etc/ssl/private/micronova.key;

    client_max_body_size 0;          # uploads of images
    proxy_request_buffering off;
    proxy_buffering off;
    proxy_read_timeout 600s;
    proxy_http_version 1.1;
    proxy_set_header Host $http_host;
    proxy_set_header X-Forwarded-Host $http_host;
    proxy_set_header X-Forwarded-Proto $scheme;
    proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
    proxy_set_header Upgrade $http_upgrade;      # consoles
    proxy_set_header Connection $connection_upgrade;{verify}

"""
    for service, path in PATHS.items():
        if service != "metadata":  # guests ask their host, and hosts ask it directly
            mount = "/" + path.split("/")[1]
            place = plan.process_url("api" if service in ("compute", "placement") else service).partition("://")[2]
            text += f"    location {mount} {{ proxy_pass {scheme}://{place}; }}\n"
    return text + "}\n"
