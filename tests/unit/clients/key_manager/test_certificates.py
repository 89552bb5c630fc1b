"""Certificates of a directory, and of a key manager that answers as Barbican does."""

import urllib.parse
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from micronova.clients.key_manager.certificates import Certificates
from micronova.http.client import Answer, ServiceClient
from micronova.objects.errors import NotFound, Unavailable

CERTIFICATE = b"\x30\x82 in DER"


class Barbican:
    """Secrets by their ids, each with a content type and its owner's token."""

    def __init__(self) -> None:
        self.secrets = {
            "binary": ("application/octet-stream", CERTIFICATE),
            "text": ("text/plain", b"-----BEGIN"),
            "odd": ("image/png", b""),
        }
        self.asked: list[tuple[str, str]] = []
        self.down = False

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        if self.down:
            return Answer(503, {}, b"")
        self.asked.append((f"{method} {url}", headers["accept"]))
        assert url.startswith("/v1/secrets/")
        id, _, payload = url.removeprefix("/v1/secrets/").partition("/")
        if headers["x-auth-token"] != "alice":
            return Answer(403, {}, b'{"title": "Forbidden", "description": "not yours"}')
        if urllib.parse.unquote(id) not in self.secrets:
            return Answer(
                404, {"x-openstack-request-id": "req-1"}, b'{"title": "Not Found", "description": "Secret not found."}'
            )
        kind, content = self.secrets[id]
        if payload:
            return Answer(200, {}, content) if headers["accept"] == kind else Answer(406, {}, b"{}")
        return Answer(200, {}, msgspec.json.encode({"content_types": {"default": kind}, "status": "ACTIVE"}))

    async def close(self) -> None:
        pass


@pytest.fixture
def barbican() -> Barbican:
    return Barbican()


@pytest.fixture
def certificates(tmp_path: Path, barbican: Barbican) -> Certificates:
    async def never() -> str:
        raise AssertionError("secrets are read with the rights of the user")

    return Certificates(tmp_path / "certificates", ServiceClient(barbican, never))


async def test_secrets_are_read_as_the_user(certificates: Certificates, barbican: Barbican) -> None:
    assert await certificates.get("binary", "alice") == CERTIFICATE
    assert barbican.asked == [
        ("GET /v1/secrets/binary", "application/json"),
        ("GET /v1/secrets/binary/payload", "application/octet-stream"),
    ]
    assert await certificates.get("text", "alice") == b"-----BEGIN"
    assert await certificates.available()


@pytest.mark.parametrize(
    ("id", "token"),
    [("binary", "bob"), ("missing", "alice"), ("odd", "alice"), ("..", "alice"), ("a/../b?x#y", "alice")],
)
async def test_secrets_that_the_user_cannot_read(certificates: Certificates, id: str, token: str) -> None:
    with pytest.raises(NotFound, match="The key manager has no certificate"):
        await certificates.get(id, token)


async def test_a_key_manager_that_is_away(certificates: Certificates, barbican: Barbican) -> None:
    barbican.down = True
    with pytest.raises(Unavailable):
        await certificates.get("binary", "alice")


async def test_files_come_first(certificates: Certificates, barbican: Barbican, tmp_path: Path) -> None:
    directory = tmp_path / "certificates"
    directory.mkdir()
    (tmp_path / "secret.pem").write_bytes(b"not in the directory")
    for name in ("binary.pem", "plain", "old.crt", "new.der", ".hidden"):
        (directory / name).write_bytes(name.encode())
    for id, file in (("binary", "binary.pem"), ("plain", "plain"), ("old", "old.crt"), ("new", "new.der")):
        assert await certificates.get(id, "") == file.encode()
    assert barbican.asked == []
    for id in ("../secret", ".hidden", "", "x" * 300, "\0"):
        with pytest.raises(NotFound):
            await certificates.get(id, "alice")


async def test_there_may_be_neither(tmp_path: Path) -> None:
    alone = Certificates(tmp_path / "certificates")
    assert not await alone.available()
    with pytest.raises(NotFound, match="There is no certificate 'c1'"):
        await alone.get("c1", "alice")
    (tmp_path / "certificates").mkdir()
    assert await alone.available()


async def test_a_catalog_without_a_key_manager(tmp_path: Path, barbican: Barbican) -> None:
    listed = False

    async def in_catalog() -> bool:
        return listed

    async def no_token() -> str:
        return ""

    found = Certificates(tmp_path / "none", ServiceClient(barbican, no_token), in_catalog=in_catalog)
    assert not await found.available()
    with pytest.raises(NotFound, match="There is no certificate 'binary'"):
        await found.get("binary", "alice")
    listed = True
    assert await found.available() and await found.get("binary", "alice") == CERTIFICATE
