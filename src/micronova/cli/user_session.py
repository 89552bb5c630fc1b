"""A person's session with a cloud of clouds.yaml: log in, find the services in the catalog, call their public APIs."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import yaml

from micronova.cli.state import StateDirectory, read_trusted
from micronova.http.client import HTTPTransport, ServiceClient, raise_for
from micronova.objects.errors import MicronovaError, Unauthorized

MEMBER = "micronova-demo"


class UserSession:
    """Logs in with the password of clouds.yaml when it is entered, and has the rights of that user, no others."""

    def __init__(self, auth: dict[str, str], region: str | None = None, ca_file: str = "") -> None:
        self._ca_file = ca_file
        self._auth = auth
        self.auth_url = _base(auth["auth_url"])
        self._region = region
        self._token = ""
        self._catalog: list[dict[str, Any]] = []
        self._transports: dict[str, HTTPTransport] = {}

    async def __aenter__(self) -> "UserSession":
        auth = self._auth
        user = {"name": auth["username"], "domain": {"name": auth["user_domain_name"]}, "password": auth["password"]}
        project = {"name": auth["project_name"], "domain": {"name": auth["project_domain_name"]}}
        body = {
            "auth": {
                "identity": {"methods": ["password"], "password": {"user": user}},
                "scope": {"project": project},
            }
        }
        transport = self._transports["identity"] = HTTPTransport(self.auth_url, ca_file=self._ca_file)
        headers = {"content-type": "application/json", "accept": "application/json"}
        answer = await transport.request("POST", "/v3/auth/tokens", headers, msgspec.json.encode(body))
        if answer.status == 401:
            raise Unauthorized(f"{auth['auth_url']} does not accept the password of {auth['username']}.")
        raise_for(answer, "POST", "/v3/auth/tokens")
        self._token = answer.headers["x-subject-token"]
        self._catalog = answer.json()["token"]["catalog"]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for transport in self._transports.values():
            await transport.close()

    async def request(self, service: str, method: str, path: str, body: Any = None) -> Any:
        """Send a request to a service, by its type in the catalog, and return the decoded body."""
        return await ServiceClient(self.transport(service), self.token).request(method, path, body)

    async def token(self) -> str:
        """Return the token."""
        return self._token

    def transport(self, service: str) -> HTTPTransport:
        """Return the transport to a service's public endpoint."""
        if service not in self._transports:
            for endpoint in (end for entry in self._catalog if entry["type"] == service for end in entry["endpoints"]):
                if endpoint["interface"] == "public" and self._region in (None, endpoint["region_id"]):
                    self._transports[service] = HTTPTransport(endpoint["url"], timeout=600.0, ca_file=self._ca_file)
                    break
            else:
                raise MicronovaError(f"The catalog has no public endpoint of type {service}.")
        return self._transports[service]


def session_of_environment(place: StateDirectory) -> UserSession:
    """Return the session that OS_CLIENT_CONFIG_FILE and OS_CLOUD name; by default the member's of the cloud in DIR.

    Raise if they name another cloud than the one in DIR.
    """
    own = place.path / "clouds.yaml"
    file = Path(os.environ.get("OS_CLIENT_CONFIG_FILE") or own)
    session = open_session(file, os.environ.get("OS_CLOUD") or MEMBER)
    if file != own:
        urls = {
            _base(str(cloud["auth"]["auth_url"]))
            for cloud in _clouds(own).values()
            if "auth_url" in cloud.get("auth", {})
        }
        if session.auth_url not in urls:
            raise MicronovaError(
                f"{file} names the cloud at {session.auth_url}, but {place.path} has the one at "
                f"{', '.join(sorted(urls))}: name the directory of the same cloud with --dir or MICRONOVA_DIR, "
                "or unset OS_CLIENT_CONFIG_FILE."
            )
    return session


def guests_of(place: StateDirectory) -> str:
    """Return what the guests of the cloud in DIR are: "real", "simulated" or "without a network"."""
    described = _read(place.path / "clouds.yaml").get("micronova")
    return str(described.get("guests", "real")) if isinstance(described, dict) else "real"


def open_session(file: Path, name: str) -> UserSession:
    """Return the session of a cloud in a clouds.yaml."""
    clouds = _clouds(file)
    if name not in clouds:
        raise MicronovaError(f"{file} has no cloud {name}: set OS_CLOUD to one of {', '.join(clouds)}.")
    defaults = {"user_domain_name": "Default", "project_domain_name": "Default"}
    auth = defaults | clouds[name].get("auth", {})
    missing = {"auth_url", "username", "password", "project_name"} - set(auth)
    if missing:
        raise MicronovaError(f"The cloud {name} in {file} has no {min(missing)}: this command logs in by password.")
    return UserSession(auth, clouds[name].get("region_name"), clouds[name].get("cacert") or "")


def _base(auth_url: str) -> str:
    """Return the address of an identity service without its version."""
    return auth_url.rstrip("/").removesuffix("/v3")


def _clouds(file: Path) -> dict[str, Any]:
    """Return the clouds in a clouds.yaml."""
    clouds: dict[str, Any] = _read(file)["clouds"]
    return clouds


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a clouds.yaml."""
    try:
        content: dict[str, Any] = yaml.safe_load(read_trusted(file))
        content["clouds"]
    except OSError as error:
        raise MicronovaError(
            f"Cannot read {file}: {error.strerror}. Name the cloud's directory with --dir or MICRONOVA_DIR, "
            "or use sudo if it is root's."
        ) from None
    except (yaml.YAMLError, KeyError, TypeError):
        raise MicronovaError(f"{file} is not a clouds.yaml.") from None
    return content
