"""Checks of certificates: our own, those of authorities, and those that the broker and the database show."""

import socket
import ssl
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from micronova.cli.checks.shape import Check, Finding, Subject, plain
from micronova.cli.names import HTTP_ROLES, ROLES
from micronova.cli.region.shown_certificate import begin_tls_with_postgres
from micronova.objects.errors import MicronovaError

if TYPE_CHECKING:
    from cryptography import x509
    from sqlalchemy.engine import URL

    from micronova.rpc.amqp.url import BrokerUrl

EXPIRES_SOON = 14 * 86_400
"""Seconds before the end of a certificate from which on it is a finding."""
ANSWER_SECONDS = 10.0


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
    yield from _certificate(api.tls_certificate, "api.tls_certificate", urlsplit(api.public_url or "").hostname)
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


def _shown(address: str, port: int, *, is_postgres: bool = False) -> "x509.Certificate | None":
    """Return the certificate that a running process shows; None if there is none, or another check says why not."""
    from cryptography import x509

    try:
        with socket.create_connection((reachable(address), port), timeout=ANSWER_SECONDS) as sock:
            if is_postgres and not begin_tls_with_postgres(sock):
                return None
            with unverified().wrap_socket(sock) as connection:
                encoded = connection.getpeercert(binary_form=True)
    except OSError:
        return None
    return None if encoded is None else x509.load_der_x509_certificate(encoded)


def unverified() -> ssl.SSLContext:
    """Return what speaks TLS with a process of which only the answer counts; its certificate is checked by itself."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def reachable(address: str) -> str:
    """Return an address to connect to what listens on an address."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104 - not listened on


def _of_others(subject: Subject) -> Iterator[Finding]:
    """Look at the files that verify other services, the broker and the database, and at our own ones for these."""
    broker, database = _broker(subject), _database(subject)
    tls = (broker.tls or {}) if broker is not None else {}
    query = dict(database.query) if database is not None else {}
    for setting, file in (
        ("ssl.ca_file", subject.settings.ssl.ca_file),
        ("default.transport_url", tls.get("cafile", "")),
        ("default.transport_url", tls.get("certfile", "")),
        ("database.connection", str(query.get("sslrootcert", ""))),
        ("database.connection", str(query.get("sslcert", ""))),
    ):
        if not file or file == "system":
            continue
        if (problem := _unreadable(file)) is not None:
            yield Finding(setting, problem, "a PEM file of certificates that this user can read")
        else:
            yield from _certificate(file, setting)


def _shown_by_others(subject: Subject) -> Iterator[Finding]:
    """Look at the dates of the certificates that the brokers and the database show."""
    broker, database = _broker(subject), _database(subject)
    asked: list[tuple[str, str, int, bool]] = []
    if broker is not None and broker.tls is not None:
        asked += [("default.transport_url", host, port, False) for host, port in broker.hosts]
    if database is not None and database.host and database.query.get("sslmode", "") not in ("disable", "allow"):
        asked.append(("database.connection", database.host, database.port or 5432, True))
    for setting, host, port, is_postgres in asked:
        if (found := _shown(host, port, is_postgres=is_postgres)) is not None:
            yield from _dates([found], setting, f"the certificate that {host}:{port} shows")


def _broker(subject: Subject) -> "BrokerUrl | None":
    from micronova.rpc.amqp.url import parse

    try:
        return parse(subject.settings.default.transport_url) if subject.on_bus else None
    except MicronovaError:
        return None  # another check says why


def _database(subject: Subject) -> "URL | None":
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    connection = subject.settings.database.connection
    try:
        return make_url(connection) if connection.startswith("postgres") else None
    except ArgumentError:
        return None  # another check says why


def _unreadable(file: str) -> str | None:
    try:
        Path(file).read_bytes()
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    return None


def _certificate(file: str, setting: str, host: str | None = None) -> Iterator[Finding]:
    """Yield what is wrong with a certificate in a PEM file: its dates, and whether it is for `host`."""
    from cryptography import x509

    try:
        found = x509.load_pem_x509_certificates(Path(file).read_bytes())
    except OSError:
        return  # another finding says why
    except ValueError:
        yield Finding(setting, f"{file} has no certificate in PEM", "a file with -----BEGIN CERTIFICATE-----")
        return
    yield from _dates(found, setting, file)
    if host is not None and not _is_for(found[0], host):
        right = f"a certificate whose subjectAltName has {host}, or another api.public_url"
        yield Finding(setting, f"{file} is not for {host}, the host of api.public_url", right)


def _dates(found: Sequence["x509.Certificate"], setting: str, what: str) -> Iterator[Finding]:
    """Yield what is wrong with the dates of certificates; of the authorities in one file some may have expired."""
    now = datetime.now(UTC)
    for number, each in enumerate(found, 1):
        named = what if len(found) == 1 else f"{what}, certificate {number} ({each.subject.rfc4514_string()}),"
        begin, end = each.not_valid_before_utc, each.not_valid_after_utc
        others = any(other.not_valid_before_utc <= now <= other.not_valid_after_utc for other in found)
        if now < begin:
            said, right = f"{named} is valid only from {begin:%Y-%m-%d %H:%M} UTC on", "a certificate that is valid"
        elif now > end:
            said = f"{named} has expired on {end:%Y-%m-%d %H:%M} UTC"
            right = "a certificate that is valid: renew it"
        elif (end - now).total_seconds() < EXPIRES_SOON:
            said = f"{named} expires on {end:%Y-%m-%d %H:%M} UTC"
            yield Finding(setting, said, "a certificate that is valid for more than 14 days: renew it", "unknown")
            continue
        else:
            continue
        # The first one in the file of a server is its own.
        is_needed = not others or (number == 1 and setting == "api.tls_certificate")
        yield Finding(setting, said, right, "error" if is_needed else "unknown")


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


CHECKS = (
    Check("certificates", HTTP_ROLES, plain(_certificates), "api.tls_certificate"),
    Check("authorities", ROLES, plain(_of_others), "ssl.ca_file"),
    Check("certificates of broker and database", ROLES, plain(_shown_by_others), "default.transport_url"),
)
