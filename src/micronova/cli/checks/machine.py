"""Checks of this machine: directories, free space, addresses to listen on, certificates, policy files, extensions."""

import errno
import os
import pwd
import shutil
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from micronova.cli.checks.shape import Check, Finding, Subject, plain
from micronova.cli.names import HTTP_ROLES, ROLES
from micronova.objects.errors import Invalid, MicronovaError

if TYPE_CHECKING:
    from cryptography import x509

FREE_BYTES = 1 << 30
EXPIRES_SOON = 14 * 86_400
"""Seconds before the end of a certificate from which on it is a finding."""
ANSWER_SECONDS = 10.0


# --- directories -----------------------------------------------------------------------------------------------


def _state_path(subject: Subject) -> Iterator[Finding]:
    path = subject.place.path
    try:
        found = next(each for each in (path, *path.parents) if each.exists())
    except PermissionError as error:
        closed = Path(error.filename or path).parent
        yield Finding("default.state_path", f"this user may not look into {closed}", "use sudo, or name another place")
        return
    if not found.is_dir():
        yield Finding("default.state_path", f"{found} is a file", "a directory that the roles may write into")
    elif not os.access(found, os.W_OK | os.X_OK):
        what = "write into" if found == path else f"make {path} in"
        yield Finding("default.state_path", f"this user may not {what} {found}", "a directory of the roles' own user")
    elif found != path:
        yield Finding("", f"{path} would be made", outcome="ok")


def _free_space(subject: Subject) -> Iterator[Finding]:
    settings = subject.settings
    places = {"default.state_path": subject.place.path}
    if settings.libvirt.instances_path and "compute" in subject.roles:
        places["libvirt.instances_path"] = Path(settings.libvirt.instances_path)
    for name, path in places.items():
        parent = next(each for each in (path, *path.parents) if os.path.lexists(each))
        usage = os.statvfs(parent)
        free = shutil.disk_usage(parent).free
        if free < FREE_BYTES:
            found = f"only {free >> 20} MiB are free at {parent}"
            yield Finding(name, found, f"{FREE_BYTES >> 20} MiB or more: remove files, or name a larger file system")
        if usage.f_files and usage.f_favail < 1000:
            yield Finding(name, f"only {usage.f_favail} more files can be made at {parent}", "remove files there")


def _log_file(subject: Subject) -> Iterator[Finding]:
    """Look whether the user of the roles may write the file of the log, or make it."""
    if not subject.settings.default.log_file:
        return
    file = Path(subject.settings.default.log_file)
    target = file if file.exists() else file.parent
    right = (
        "a file that the user of the roles may write, in a directory in which it may make files: lines go to standard "
        "error. A unit of the package micronova@.service may write below /var/log/micronova only"
    )
    if file.is_dir():
        yield Finding("default.log_file", f"{file} is a directory", right)
    elif not target.exists():
        yield Finding("default.log_file", f"there is no directory {target}", right)
    elif not _may_write(target, subject.settings.default.user):
        yield Finding("default.log_file", f"the user of the roles may not write {target}", right)


def _may_write(path: Path, user: str) -> bool:
    """Return whether roles may write there: as this user, or as what they become if root starts them."""
    if os.geteuid() != 0:
        return os.access(path, os.W_OK)
    try:
        known = pwd.getpwnam(user)
    except KeyError:  # the first start makes it
        return True
    found = path.stat()
    if known.pw_uid == found.st_uid:
        return bool(found.st_mode & stat.S_IWUSR) or known.pw_uid == 0
    if found.st_gid in os.getgrouplist(user, known.pw_gid):
        return bool(found.st_mode & stat.S_IWGRP) or known.pw_uid == 0
    return bool(found.st_mode & stat.S_IWOTH) or known.pw_uid == 0


def _console_pages(subject: Subject) -> Iterator[Finding]:
    console = subject.settings.console
    for name, path, package in (
        ("console.novnc_path", console.novnc_path, "novnc"),
        ("console.xterm_path", console.xterm_path, "node-xterm"),
    ):
        if not Path(path).is_dir():
            right = f"the directory of the package {package}: install it, or name where it is"
            yield Finding(name, f"{path} is not there, so that pages of consoles stay empty", right)


# --- addresses -------------------------------------------------------------------------------------------------


def _addresses(subject: Subject) -> Iterator[Finding]:
    settings = subject.settings
    api = settings.api
    if subject.among(HTTP_ROLES) and (subject.on_bus or subject.roles_are_named):
        yield from _address(api.listen, api.port, "api.listen", "api.port", bool(api.tls_certificate))
    for name, value, needed in (
        ("api.metrics_listen", api.metrics_listen, True),
        ("console.relay_listen", settings.console.relay_listen, "compute" in subject.roles),
    ):
        if not value or not needed:
            continue
        address, colon, port = value.rpartition(":")
        if not colon or not port.isdecimal() or not 0 <= int(port) < 65_536:
            yield Finding(name, f"{value!r} is not ADDRESS:PORT", "such as 127.0.0.1:9100")
        else:
            yield from _address(address.strip("[]") or "127.0.0.1", int(port), name, name, False)


def _address(address: str, port: int, of_address: str, of_port: str, tls: bool) -> Iterator[Finding]:
    """Try to listen, for a moment. A role of ours that listens there already is what should be there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
        except socket.gaierror:
            yield Finding(of_address, f"{address!r} is neither an address nor a known name", "such as 0.0.0.0")
        except OverflowError:
            yield Finding(of_port, f"{port} is no port", "a number from 1 to 65535")
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                right = "an address of this machine (`ip address`), or 0.0.0.0 for all"
                yield Finding(of_address, f"this machine has no address {address}", right)
            elif error.errno == errno.EADDRINUSE:
                ours = _answers_as_ours(address, port, tls)
                if ours is None:
                    said = f"what listens on {address}:{port} does not answer within {ANSWER_SECONDS:g} s"
                    yield Finding(of_port, said, "a role of Micronova that answers, or a port that is free", "unknown")
                elif not ours:
                    yield Finding(of_port, f"another program listens on {address}:{port}", "a port that is free")
            elif error.errno in (errno.EACCES, errno.EPERM):
                yield Finding(of_port, f"this user may not listen on port {port}", "a port of 1024 or more, or root")
            else:
                yield Finding(of_address, f"cannot listen on {address}:{port}: {error.strerror}", "another address")


def _answers_as_ours(address: str, port: int, tls: bool) -> bool | None:
    """Return whether a process of Micronova answers there: by its health check, or by its metrics; None: no answer."""
    import http.client

    target = _reachable(address)
    for path, proof in (("/healthcheck", b"OK"), ("/metrics", b"micronova_")):
        connection: http.client.HTTPConnection = http.client.HTTPConnection(target, port, timeout=ANSWER_SECONDS)
        if tls:
            connection = http.client.HTTPSConnection(target, port, timeout=ANSWER_SECONDS, context=_unverified())
        try:
            connection.request("GET", path)
            if proof in connection.getresponse().read(1 << 20):
                return True
        except TimeoutError:
            return None
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
    return False


# --- certificates ----------------------------------------------------------------------------------------------


def _certificates(subject: Subject) -> Iterator[Finding]:
    api = subject.settings.api
    if bool(api.tls_certificate) != bool(api.tls_key):
        missing, given = ("tls_key", "tls_certificate") if api.tls_certificate else ("tls_certificate", "tls_key")
        right = f"a PEM file, which belongs to that of api.{given}: with one of them alone the APIs do not start"
        yield Finding(f"api.{missing}", f"it is empty, and api.{given} is set", right)
        return
    if not api.tls_certificate or not api.tls_key:
        if (api.public_url or "").startswith("https:") and subject.settings.api.listen not in ("127.0.0.1", "::1"):
            found = "api.public_url is https://, and this process speaks HTTP"
            right = "a certificate here, or a proxy with one in front of it"
            yield Finding("api.tls_certificate", found, right, "unknown")
        return
    yield from certificate(api.tls_certificate, "api.tls_certificate", urlsplit(api.public_url or "").hostname)
    for name, file in (("api.tls_certificate", api.tls_certificate), ("api.tls_key", api.tls_key)):
        if (problem := _unreadable(file)) is not None:
            yield Finding(name, problem, "a PEM file that this user can read")
            return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(api.tls_certificate, api.tls_key)
    except ssl.SSLError as error:
        said = error.reason or str(error)
        right = "the private key, in PEM, of the first certificate in api.tls_certificate"
        yield Finding("api.tls_key", f"it does not fit to api.tls_certificate ({said})", right)
        return
    shown, wanted = _shown(api.listen, api.port), _first_certificate(api.tls_certificate)
    if shown is not None and wanted is not None and shown != wanted:
        found = f"what listens on {api.listen}:{api.port} shows another certificate than {api.tls_certificate}"
        right = "a process that has read it: reload it by SIGHUP (`systemctl reload`)"
        yield Finding("api.tls_certificate", found, right, "unknown")


def _shown(address: str, port: int) -> "x509.Certificate | None":
    """Return the certificate that a running process shows; None if there is none, or another check says why not."""
    from cryptography import x509

    try:
        with (
            socket.create_connection((_reachable(address), port), timeout=ANSWER_SECONDS) as sock,
            _unverified().wrap_socket(sock) as connection,
        ):
            encoded = connection.getpeercert(binary_form=True)
    except OSError:
        return None
    return None if encoded is None else x509.load_der_x509_certificate(encoded)


def _unverified() -> ssl.SSLContext:
    """Return what speaks TLS with a process of which only the answer counts; its certificate is checked by itself."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _reachable(address: str) -> str:
    """Return an address to connect to what listens on an address."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104 - not listened on


def _authorities(subject: Subject) -> Iterator[Finding]:
    """Look at the file with the authorities of other services."""
    file = subject.settings.ssl.ca_file
    if not file:
        return
    if (problem := _unreadable(file)) is not None:
        yield Finding("ssl.ca_file", problem, "a PEM file of authorities that this user can read")
        return
    yield from certificate(file, "ssl.ca_file")


def _unreadable(file: str) -> str | None:
    try:
        Path(file).read_bytes()
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    return None


def certificate(file: str, setting: str, host: str | None = None) -> Iterator[Finding]:
    """Yield what is wrong with a certificate in a PEM file: its dates, and whether it is for `host`."""
    try:
        found = _first_certificate(file)
    except ValueError:
        yield Finding(setting, f"{file} has no certificate in PEM", "a file with -----BEGIN CERTIFICATE-----")
        return
    if found is None:
        return
    now = datetime.now(UTC)
    begin, end = found.not_valid_before_utc, found.not_valid_after_utc
    if now < begin:
        yield Finding(
            setting, f"{file} is valid only from {begin:%Y-%m-%d %H:%M} UTC on", "a certificate that is valid"
        )
    if now > end:
        yield Finding(
            setting, f"{file} has expired on {end:%Y-%m-%d %H:%M} UTC", "a certificate that is valid: renew it"
        )
    elif (end - now).total_seconds() < EXPIRES_SOON:
        said = f"{file} expires on {end:%Y-%m-%d %H:%M} UTC"
        yield Finding(setting, said, "a certificate that is valid for more than 14 days: renew it", "unknown")
    if host is not None and not _is_for(found, host):
        right = f"a certificate whose subjectAltName has {host}, or another api.public_url"
        yield Finding(setting, f"{file} is not for {host}, the host of api.public_url", right)


def _first_certificate(file: str) -> "x509.Certificate | None":
    """Return the first certificate in a PEM file, None if it cannot be read: another finding says why."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(Path(file).read_bytes())[0]
    except OSError:
        return None


def _is_for(found: Any, host: str) -> bool:
    from cryptography import x509

    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    known = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    above = host.partition(".")[2]
    return any(name.lower() in (host.lower(), f"*.{above.lower()}") for name in known)


# --- programs ----------------------------------------------------------------------------------------------------


def _guests(subject: Subject) -> Iterator[Finding]:
    """Look for what real guests and their networks need on this machine."""
    from micronova.cli.supervisor import lack_of_guests, lack_of_networks, runs_qemu
    from micronova.virt.libvirt.setup import NEEDS_ROOT

    settings = subject.settings
    right = "a machine that can run guests (docs/install.md), or another driver in compute.compute_driver"
    if settings.compute.compute_driver != "libvirt":
        return
    if "compute" in subject.roles and (lack := lack_of_guests(settings)) is not None:
        if lack == NEEDS_ROOT:
            yield Finding("", "nothing is missing as far as this user can tell", "run this check as root", "unknown")
        else:
            yield Finding("compute.compute_driver", f"this machine cannot run guests. {lack}", right)
    if "network-agent" in subject.roles and runs_qemu(settings) and (lack := lack_of_networks()) is not None:
        yield Finding("compute.compute_driver", f"this machine cannot have networks of guests. {lack}", right)


def _volume_programs(subject: Subject) -> Iterator[Finding]:
    from micronova.virt.libvirt.storage import sandbox, tools

    program, package = "qemu-img", tools.PACKAGES["qemu-img"]
    without = "volumes can be neither encrypted nor made of images that are not raw"
    if shutil.which(program) is None:
        right = f"apt-get install --no-install-recommends {package}"
        yield Finding("", f"{program} is missing: {without}", right, "unknown")
    elif (lack := sandbox.obstacle()) is not None:
        yield Finding("", f"{lack}: {without}", "a kernel that confines programs", "unknown")


# --- policy files and extensions -------------------------------------------------------------------------------


def _policy_files(subject: Subject) -> Iterator[Finding]:
    from micronova.api.compute.extensions import load_extensions
    from micronova.policies.enforcer import Enforcer
    from micronova.policies.placement import RULES

    settings = subject.settings
    for name, file in (
        ("api.policy_file", settings.api.policy_file),
        ("placement.policy_file", settings.placement.policy_file),
    ):
        if file:
            rules = load_extensions().rules if name == "api.policy_file" else RULES
            try:
                Enforcer(rules, Path(file))
            except MicronovaError as error:
                right = "names that `micronova policy check` lists, each with a check of oslo.policy"
                yield Finding(name, error.message, right)


async def _extensions(subject: Subject) -> list[Finding]:
    """Compose the API with the installed extensions, as its start does."""
    from micronova.api.compute.extensions import load_extensions
    from micronova.api.installed_extensions import GROUP
    from micronova.cli.openapi import composed_routes
    from micronova.plugins import entry_points

    required = subject.settings.api.required_extensions
    if not (entry_points.registered(GROUP) or required):
        return []
    extensions = load_extensions()
    await composed_routes(subject.settings, extensions)
    found = [Finding("", f"{each.title} is used", outcome="ok") for each in extensions.used]
    right = "an extension that fits to this release, or none: uninstall it"
    found += [Finding("", f"{title}: {problem}", right) for title, problem in extensions.problems.items()]
    try:
        extensions.check_required(required)
    except Invalid as error:
        found.append(Finding("api.required_extensions", error.message, "aliases of extensions that are installed"))
    return found


def _local_clock(subject: Subject) -> Iterator[Finding]:
    if time.time() < 1_700_000_000:
        yield Finding("", f"the clock of this machine is at {datetime.now(UTC):%Y-%m-%d}", "NTP sets it")


CHECKS = (
    Check("state_path", ROLES, plain(_state_path), "default.state_path"),
    Check("log file", ROLES, plain(_log_file), "default.log_file"),
    Check("free space", ROLES, plain(_free_space), "default.state_path"),
    Check("clock of this machine", ROLES, plain(_local_clock)),
    Check("listen addresses", ROLES, plain(_addresses), "api.listen"),
    Check("certificates", HTTP_ROLES, plain(_certificates), "api.tls_certificate"),
    Check("authorities", ROLES, plain(_authorities), "ssl.ca_file"),
    Check("policy files", ("api",), plain(_policy_files), "api.policy_file"),
    Check("API extensions", ("api",), _extensions, "api.required_extensions"),
    Check("guests on this machine", ("compute", "network-agent"), plain(_guests), "compute.compute_driver"),
    Check("programs for volumes", ("volume",), plain(_volume_programs)),
    Check("pages of consoles", ("console",), plain(_console_pages), "console.novnc_path"),
)
