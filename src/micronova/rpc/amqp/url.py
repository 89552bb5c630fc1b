"""Broker URLs: amqp://USER:PASSWORD@HOST[:PORT][,HOST[:PORT]…]/VHOST, or amqps with cafile, certfile and keyfile."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from micronova.rpc.errors import BadBusUrl

TLS_OPTIONS = ("cafile", "certfile", "keyfile")


@dataclass(frozen=True)
class BrokerUrl:
    """The addresses of a cluster's brokers, and the login."""

    hosts: tuple[tuple[str, int], ...]
    user: str
    password: str
    vhost: str
    tls: dict[str, str] | None = None

    def __str__(self) -> str:
        """Return the URL without the password, for errors and logs."""
        return self.for_user(self.user)

    def for_user(self, login: str) -> str:
        """Return the URL with another login: "user", or "user:password"."""
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        scheme, query = ("amqp", "") if self.tls is None else ("amqps", f"?{urlencode(self.tls)}" if self.tls else "")
        return f"{scheme}://{login}@{hosts}/{'' if self.vhost == '/' else quote(self.vhost, safe='')}{query}"

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS context if the URL asks for TLS; the broker's certificate is always verified."""
        if self.tls is None:
            return None
        context = ssl.create_default_context(cafile=self.tls.get("cafile"))
        if "certfile" in self.tls:
            context.load_cert_chain(self.tls["certfile"], self.tls.get("keyfile"))
        return context


def parse(url: str) -> BrokerUrl:
    """Read a broker URL; raise BadBusUrl."""
    try:
        return _parse(url)
    except ValueError as error:
        raise BadBusUrl(f"The broker URL (default.transport_url) is not valid: {error}.") from None


def _parse(url: str) -> BrokerUrl:
    # Not with urlsplit: it reads a list of hosts as one host, and newer versions refuse brackets within it.
    scheme, _, rest = url.partition("://")
    if scheme not in ("amqp", "amqps"):
        raise ValueError(f"it begins with amqp:// or amqps://, not {scheme}://")
    secure = scheme == "amqps"
    before, _, query = rest.partition("?")
    options = parse_qs(query, keep_blank_values=True)
    for option in options:
        if not secure and (option in TLS_OPTIONS or option.startswith("ssl")):
            raise ValueError(f"{option} is for TLS, with which the URL begins with amqps://, not amqp://")
    authority, _, vhost = before.partition("/")
    login, _, hosts = authority.rpartition("@")
    user, _, password = login.partition(":")
    default_port = 5671 if secure else 5672
    return BrokerUrl(
        hosts=tuple(_host(host, default_port) for host in hosts.split(",")),
        user=unquote(user) or "guest",
        password=unquote(password) or "guest",
        vhost=unquote(vhost) or "/",
        tls={key: values[0] for key, values in options.items() if values[0]} if secure else None,
    )


def _host(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("it names at least one host")
    return parts.hostname, parts.port or default_port
