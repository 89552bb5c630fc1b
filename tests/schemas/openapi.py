"""Our OpenAPI document, as the judge of what the compute API answers.

The clouds of the functional tests pass every answer through a `Judge`: an answer that the document of its microversion
does not allow fails the test that got it.
"""

import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jsonschema_rs
import msgspec

from micronova.api.compute.api_document import document
from micronova.http.client import Answer, Transport
from micronova.http.service import Route

PREFIX = "/compute/v2.1"


class Wrong(AssertionError):
    """An answer that the document does not allow."""


class Document:
    """The document of one microversion."""

    def __init__(self, routes: Sequence[Route], minor: int) -> None:
        self.minor = minor
        self.content = document(routes, minor)
        self._paths = [(re.compile(_pattern(path)), path) for path in _most_exact_first(self.content["paths"])]
        self._resources = {path.split("/")[1] for path in self.content["paths"]}
        self._validators: dict[tuple[str, str, str], Any] = {}

    def check(
        self, method: str, url: str, status: int, headers: Mapping[str, str], body: bytes, sent: bytes | None = None
    ) -> None:
        """Raise Wrong unless the answer to a request, with `sent` as its body, is what the document says."""
        path = urllib.parse.unquote(url.partition("?")[0]).removeprefix(PREFIX) or "/"
        if path.split("/")[1] not in self._resources and path.count("/") > 1:
            path = "/" + path.split("/", 2)[2]  # without the project
        found = next((known for pattern, known in self._paths if pattern.fullmatch(path)), None)
        if found is None or method.lower() not in self.content["paths"][found]:
            if status not in (400, 401, 404, 406):
                raise Wrong(f"{method} {path} is not in the document of 2.{self.minor}: {status} {body[:300]!r}")
            return
        declared = self.content["paths"][found][method.lower()]["responses"].get(str(status))
        where = f"{method} {found} at 2.{self.minor}: {status}"
        if declared is None:
            raise Wrong(f"{where} is not in the document: {body[:300]!r}")
        if "$ref" in declared:
            declared = self.content["components"]["responses"][str(status)]
        for name, reference in declared.get("headers", {}).items():
            known = self.content["components"]["headers"][reference["$ref"].rpartition("/")[2]]
            value = headers.get(name.lower())
            if value is None:
                if known.get("required"):
                    raise Wrong(f"{where}: the header {name} is missing")
            elif known["schema"].get("const", value) != value:
                raise Wrong(f"{where}: the header {name} is {value}")
        action = _action(sent) if "x-answers" in self.content["paths"][found][method.lower()] and status < 400 else ""
        schema = declared.get("content", {}).get("application/json", {}).get("schema")
        if action:
            schema = self.content["paths"][found][method.lower()]["x-answers"].get(action, {}).get(str(status))
        if schema is None:
            if body:
                raise Wrong(f"{where}: a body that is not in the document: {body[:300]!r}")
            return
        if not headers.get("content-type", "").startswith(("application/json", "application/vnd.openstack.compute")):
            raise Wrong(f"{where}: content-type {headers.get('content-type')}")
        self._validate(where, (found, method, str(status) + action), schema, body)

    def _validate(self, where: str, key: tuple[str, str, str], schema: dict[str, Any], body: bytes) -> None:
        if key not in self._validators:
            whole = {**schema, "components": self.content["components"]}
            self._validators[key] = jsonschema_rs.Draft202012Validator(whole)
        problems = [
            f"{'.'.join(map(str, each.instance_path))}: {each.message}"
            for each in self._validators[key].iter_errors(_decoded(body))
        ]
        if problems:
            raise Wrong(f"{where}: " + "; ".join(problem[:500] for problem in problems[:5]))


def _action(sent: bytes | None) -> str:
    """Return the action that the body of a request names."""
    try:
        return str(next(iter(msgspec.json.decode(sent or b"{}")), ""))
    except (msgspec.DecodeError, TypeError):
        return ""


def _decoded(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise Wrong(f"not JSON ({error}): {body[:300]!r}") from None


def _pattern(path: str) -> str:
    return re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))


def _most_exact_first(paths: Mapping[str, Any]) -> list[str]:
    """Sort paths as the router prefers them: /flavors/detail before /flavors/{id}."""
    return sorted(paths, key=lambda path: [part.startswith("{") for part in path.split("/")])


_documents: dict[tuple[int, frozenset[str]], Document] = {}


class Judge:
    """A transport that compares answers of the compute API with the document."""

    def __init__(self, transport: Transport, routes: Callable[[], Sequence[Route]]) -> None:
        self._transport = transport
        self._routes = routes
        self._documents: dict[int, Document] = {}

    def document(self, minor: int) -> Document:
        """Return the document of a microversion; it is made once for all clouds with the same routes."""
        if minor not in self._documents:
            key = minor, frozenset(route.label for route in self._routes())
            if key not in _documents:
                _documents[key] = Document(self._routes(), minor)
            self._documents[minor] = _documents[key]
        return self._documents[minor]

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """Send a request, and check what comes back."""
        answer = await self._transport.request(method, url, headers, body)
        version = answer.headers.get("openstack-api-version", "")
        if url.startswith((f"{PREFIX}/", f"{PREFIX}?")) and version.startswith("compute 2."):
            minor = int(version.rpartition(".")[2])
            self.document(minor).check(method, url, answer.status, answer.headers, answer.body, body)
        return answer

    async def close(self) -> None:
        """Close the connection."""
        await self._transport.close()
