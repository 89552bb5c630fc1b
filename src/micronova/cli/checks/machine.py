"""Checks of this machine: directories, free space, addresses to listen on, programs, policy files, extensions."""

import errno
import os
import pwd
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from micronova.cli.checks.certificates import ANSWER_SECONDS, reachable, unverified
from micronova.cli.checks.shape import Check, Finding, Subject, plain
from micronova.cli.names import HTTP_ROLES, ROLES
from micronova.objects.errors import Invalid, MicronovaError

FREE_BYTES = 1 << 30


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

    target = reachable(address)
    for path, proof in (("/healthcheck", b"OK"), ("/metrics", b"micronova_")):
        connection: http.client.HTTPConnection = http.client.HTTPConnection(target, port, timeout=ANSWER_SECONDS)
        if tls:
            connection = http.client.HTTPSConnection(target, port, timeout=ANSWER_SECONDS, context=unverified())
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
    Check("policy files", ("api",), plain(_policy_files), "api.policy_file"),
    Check("API extensions", ("api",), _extensions, "api.required_extensions"),
    Check("guests on this machine", ("compute", "network-agent"), plain(_guests), "compute.compute_driver"),
    Check("programs for volumes", ("volume",), plain(_volume_programs)),
    Check("pages of consoles", ("console",), plain(_console_pages), "console.novnc_path"),
)
