"""Which images have to be signed, by the settings and by what a server trusts."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from micronova.clients.image.client import ImageClient
from micronova.clients.key_manager.certificates import Certificates
from micronova.http.client import Answer, ServiceClient
from micronova.objects.clock import SystemClock
from micronova.objects.errors import Invalid
from micronova.objects.image import ImageMeta
from micronova.servers.image_signatures import ImageSignatures, SignatureRules
from tests.certificates import Signer

SIGNER = Signer("RSA-PSS")  # its signatures are longer than the properties that servers keep
IMAGES = {
    "signed": SIGNER.properties(b"data", "c1"),
    "unsigned": {"os_distro": "debian"},
}


class Glance:
    """The documents of the images; it notes whose tokens come."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    async def request(self, method: str, url: str, headers: Any, body: bytes | None) -> Answer:
        self.tokens.append(headers["x-auth-token"])
        id = url.removeprefix("/v2/images/")
        if id not in IMAGES:
            return Answer(404, {"x-openstack-request-id": "req-1"}, b"{}")
        return Answer(200, {}, msgspec.json.encode({"id": id, "status": "active", **IMAGES[id]}))

    async def close(self) -> None:
        pass


class World:
    def __init__(self, directory: Path) -> None:
        self.glance = Glance()
        self._directory = directory
        (directory / "c1.pem").write_bytes(SIGNER.pem)
        (directory / "c2.pem").write_bytes(Signer(number=1).pem)

    def signatures(self, **rules: Any) -> ImageSignatures:
        async def service_user() -> str:
            return "service"

        return ImageSignatures(
            image_client=ImageClient(ServiceClient(self.glance, service_user)),
            certificates=Certificates(self._directory),
            clock=SystemClock(),
            rules=SignatureRules(**rules),
        )

    async def is_verified(self, id: str, trusted: list[str] | None, **rules: Any) -> bool:
        made = await self.signatures(**rules).signed(ImageMeta(id=id), trusted, user_token="alice", image_token="alice")
        return made.signature is not None


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


OFF: dict[str, Any] = {}
VERIFY = {"verify": True}
VALIDATE = {"verify": True, "validate": True}
DEFAULTS = {**VALIDATE, "default_trusted": ("c1",)}
OTHERS = {**VALIDATE, "default_trusted": ("c2",)}


@pytest.mark.parametrize(
    ("rules", "trusted", "verified"),
    [(OFF, None, False), (OFF, ["c1"], True), (VERIFY, None, True), (VERIFY, ["c1"], True), (VALIDATE, ["c1"], True),
     (DEFAULTS, None, True), (OTHERS, ["c1"], True)],
)  # fmt: skip
async def test_which_images_are_verified(
    world: World, rules: dict[str, Any], trusted: list[str] | None, verified: bool
) -> None:
    assert await world.is_verified("signed", trusted, **rules) is verified
    assert world.glance.tokens == ["alice"] * verified
    if not verified:
        assert not await world.is_verified("unsigned", trusted, **rules)
        return
    with pytest.raises(Invalid, match="The signature of image unsigned cannot be verified: the image is not signed"):
        await world.is_verified("unsigned", trusted, **rules)
    with pytest.raises(Invalid):
        await world.is_verified("missing", trusted, **rules)


@pytest.mark.parametrize(
    ("rules", "trusted", "why"),
    [(VALIDATE, None, "trusted_image_certificates names none"), (OTHERS, None, "none of the trusted ones"),
     (VERIFY, ["c2"], "none of the trusted ones"), (OFF, ["c2"], "none of the trusted ones")],
)  # fmt: skip
async def test_which_certificates_have_to_be_trusted(
    world: World, rules: dict[str, Any], trusted: list[str] | None, why: str
) -> None:
    with pytest.raises(Invalid, match=why):
        await world.is_verified("signed", trusted, **rules)


@pytest.mark.parametrize(
    ("rules", "named", "kept"),
    [(OFF, None, None), (OFF, ["c2"], ["c2"]), (VERIFY, None, None), (VALIDATE, None, None), (DEFAULTS, None, ["c1"]),
     (DEFAULTS, ["c2"], ["c2"]), ({"default_trusted": ("c1",)}, None, None)],
)  # fmt: skip
def test_what_a_server_keeps_as_trusted(
    world: World, rules: dict[str, Any], named: list[str] | None, kept: list[str] | None
) -> None:
    assert world.signatures(**rules).trusted(named) == kept


async def test_the_image_of_an_operator_is_read_by_the_service_user(world: World) -> None:
    await world.signatures(verify=True).signed(ImageMeta(id="signed"), None, user_token="alice")
    assert world.glance.tokens == ["service"]
