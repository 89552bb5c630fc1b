"""Checks of what a settings file says by itself: keys, intervals, names of plugins, URLs, users of the broker."""

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from micronova.cli.checks.shape import CONTROL_ROLES, HOST_ROLES, Check, Finding, Subject, plain
from micronova.cli.names import COMPUTE_ROLES, EMBEDDED_ROLES, HTTP_ROLES
from micronova.objects.errors import Invalid, MicronovaError

NEW_KEY = "the output of `openssl rand -hex 32`, the same for"
KEYS = {
    "default.secret_key": ("api", "conductor", "identity", "volume"),
    "glance.ticket_key": ("api", "conductor", "image"),
    "neutron.ticket_key": ("metadata", "conductor", "network"),
}
"""The keys that processes share, and the roles that need the same one."""


def value_of(subject: Subject, name: str) -> object:
    """Return the value of a setting by its name, SECTION.OPTION."""
    section, _, option = name.partition(".")
    return getattr(getattr(subject.settings, section), option)


def _keys(subject: Subject) -> Iterator[Finding]:
    for name, roles in KEYS.items():
        key = str(value_of(subject, name))
        right = f"{NEW_KEY} {', '.join(roles)}"
        if key and len(set(key)) == 1:
            yield Finding(name, "everybody can guess it, because all its digits are the same", right)
        elif not key and name == "default.secret_key" and subject.on_bus and subject.among(roles):
            found = f"it is empty, so each process takes the key of the directory it runs in ({subject.place.path})"
            yield Finding(name, found, right)


def _intervals(subject: Subject) -> Iterator[Finding]:
    default, lease = subject.settings.default, subject.settings.conductor.lease
    least = 3 * default.report_interval
    if default.service_down_time < least:
        found = f"{default.service_down_time:g} s is less than three heartbeats (default.report_interval)"
        yield Finding("default.service_down_time", f"{found}: hosts that work count as down", f"{least:g} or more")
    if subject.among(("conductor",)) and lease < least:
        found = f"{lease:g} s is less than three heartbeats (default.report_interval): operations change owners"
        yield Finding("conductor.lease", found, f"{least:g} or more")


def _transport(subject: Subject) -> Iterator[Finding]:
    url = subject.settings.default.transport_url
    needed = {*COMPUTE_ROLES, "console", "network-agent"}
    if url.startswith("local:"):
        alone = subject.roles_are_named and set(COMPUTE_ROLES) - set(subject.roles)
        if alone and subject.among(needed):
            yield Finding(
                "default.transport_url",
                f"{url} reaches only this process, and {', '.join(subject.among(needed))} run apart from the others",
                "amqp://USER:PASSWORD@HOST/ of the RabbitMQ that all processes use",
            )
        return
    from micronova.rpc.amqp.url import parse

    user, control = parse(url).user, subject.settings.default.control_users
    if not control:
        yield Finding(
            "default.control_users",
            "it is empty: every user of the broker may give orders to hosts and answer for any service",
            f'the broker users of the control services, such as ["{user if not is_host(subject) else "micronova"}"], '
            "the same on hosts",
        )
    elif not is_host(subject) and user not in control:
        yield Finding(
            "default.control_users",
            f"it does not name {user}, the user of default.transport_url: hosts refuse the orders of this process",
            f"{[*control, user]}".replace("'", '"'),
        )
    elif is_host(subject) and user in control:
        yield Finding(
            "default.transport_url",
            f"the broker user {user} of this host is a control user: whoever takes this host may give orders to all",
            "the user that `micronova host add NAME` prints, which this host has for itself",
        )
    host = subject.process.host
    if is_host(subject) and control and user not in control and user != host:
        yield Finding(
            "default.host",
            f"this host is {host} and its broker user is {user}: conductors refuse its reports",
            f"{user}, the name with which `micronova host add` made the user",
        )


def is_host(subject: Subject) -> bool:
    """Return whether the settings are those of a compute host, which has nothing of the control services."""
    return bool(subject.among(HOST_ROLES)) and not subject.among((*CONTROL_ROLES, *EMBEDDED_ROLES))


def _pins(subject: Subject) -> Iterator[Finding]:
    from micronova.compute.rpcapi import COMPUTE_INTERFACE
    from micronova.conductor.rpcapi import HOSTS, TASKS
    from micronova.rpc.contract import is_compatible, parse_version
    from micronova.scheduler.rpcapi import SCHEDULER_INTERFACE

    newest = {
        "compute": [COMPUTE_INTERFACE.version],
        "conductor": [TASKS.version, HOSTS.version],
        "scheduler": [SCHEDULER_INTERFACE.version],
    }
    for topic, versions in newest.items():
        pin = getattr(subject.settings.upgrade_levels, topic)
        right = f"empty, or a version up to {' or '.join(versions)}, such as that of the release before"
        if not pin:
            continue
        try:
            parse_version(pin)
        except ValueError:
            yield Finding(f"upgrade_levels.{topic}", f"{pin!r} is not a version", right)
            continue
        if not any(is_compatible(pin, version) for version in versions):
            yield Finding(f"upgrade_levels.{topic}", f"this release does not know version {pin}", right)


def _api(subject: Subject) -> Iterator[Finding]:
    api = subject.settings.api
    if api.public_url is not None and urlsplit(api.public_url).scheme not in ("http", "https"):
        yield Finding("api.public_url", f"{api.public_url!r} is no URL", "https://HOST:PORT as clients reach the APIs")
    for proxy in api.trusted_proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError:
            right = "addresses and networks, such as 192.0.2.7 or 192.0.2.0/24"
            yield Finding("api.trusted_proxies", f"{proxy!r} is neither an address nor a network", right)
    if api.auth_strategy == "noauth2" and not _is_loopback(api.listen):
        found = f"noauth2 believes every request, and api.listen ({api.listen}) is reached from other machines"
        yield Finding("api.auth_strategy", found, "keystone")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _filters(subject: Subject) -> Iterator[Finding]:
    from micronova.objects.pci_devices import parse_aliases
    from micronova.scheduler.filters.base import FilterOptions
    from micronova.scheduler.filters.registry import load_filters

    settings = subject.settings
    down_time = settings.default.service_down_time
    options = FilterOptions(service_down_time=down_time, settings=settings.filter_scheduler, metrics=settings.metrics)
    for name, attempt, right in (
        ("filter_scheduler.enabled_filters", lambda: load_filters(options), "names of the list in docs/scheduler.md"),
        ("pci.alias", lambda: parse_aliases(settings.pci.alias), "tables with name, vendor_id and product_id"),
    ):
        try:
            attempt()
        except MicronovaError as error:
            yield Finding(name, error.message, right)


def _driver(subject: Subject) -> Iterator[Finding]:
    from micronova.virt.loader import load_compute_driver

    try:
        load_compute_driver(subject.settings.compute.compute_driver)
    except Invalid as error:
        yield Finding("compute.compute_driver", error.message, "fake or libvirt, or the name of an installed driver")


def _vendor_data(subject: Subject) -> Iterator[Finding]:
    from micronova.cli.vendor_data import vendor_data_source

    try:
        vendor_data_source(subject.settings.api)
    except MicronovaError as error:
        right = "api.vendordata_jsonfile_path names a file with JSON, api.vendordata_dynamic_targets NAME@URL"
        yield Finding("api.vendordata_providers", error.message, right)


def _token_keys(subject: Subject) -> Iterator[Finding]:
    for key in subject.settings.identity.public_key.split():
        try:
            usable = len(bytes.fromhex(key)) == 32
        except ValueError:
            usable = False
        if not usable:
            found = f"{key[:16]}… is no public key"
            yield Finding("identity.public_key", found, "what `micronova token-key show` prints where identity runs")


def _identity_url(subject: Subject) -> Iterator[Finding]:
    settings = subject.settings
    needs = subject.among(("api", "conductor", "image", "network", "volume"))
    here = "identity" in subject.roles or settings.api.auth_strategy == "noauth2"
    if needs and not here and not settings.identity.auth_url:
        yield Finding(
            "identity.auth_url",
            f"it is empty, and {', '.join(needs)} run without the role identity: they do not start",
            "the URL of the identity service, such as https://keystone.example/v3",
        )


CHECKS = (
    Check("keys", ("api", "conductor", "identity", "image", "network", "volume", "metadata"), plain(_keys)),
    Check("intervals", (*CONTROL_ROLES, *HOST_ROLES), plain(_intervals)),
    Check("message bus settings", (*CONTROL_ROLES, *HOST_ROLES), plain(_transport), "default.transport_url",
          "amqp://USER:PASSWORD@HOST[,HOST…]/VHOST"),
    Check("versions of messages", (*CONTROL_ROLES, *HOST_ROLES), plain(_pins)),
    Check("API settings", HTTP_ROLES, plain(_api)),
    Check("scheduler filters", ("api", "scheduler"), plain(_filters), "filter_scheduler.enabled_filters"),
    Check("compute driver", ("compute",), plain(_driver), "compute.compute_driver"),
    Check("vendor data", ("compute", "metadata"), plain(_vendor_data), "api.vendordata_providers"),
    Check("keys of tokens", HTTP_ROLES, plain(_token_keys), "identity.public_key"),
    Check("identity URL", ("api", "conductor", *EMBEDDED_ROLES), plain(_identity_url), "identity.auth_url"),
)  # fmt: skip
