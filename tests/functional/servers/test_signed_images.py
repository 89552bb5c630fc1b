"""Servers from signed images: hosts verify the data with certificates that the server trusts."""

import uuid
from typing import Any

import pytest
import sqlalchemy as sa

from micronova.db.tables import instances
from micronova.imageformat.signatures import DataVerifier
from tests.certificates import Signer
from tests.functional.cloud import Caller, Cloud, CloudOptions, OneProcess, only_in_one_process
from tests.functional.servers.embedded_services import call, image, ok

pytestmark = only_in_one_process("puts certificates into the directory of the cloud")
CLOUD = CloudOptions(hosts=2, roles=("image",))
DATA = bytes(1024)  # of the images that tests upload
OCTETS = {"content-type": "application/octet-stream"}
ROOT = Signer(name="root")
SIGNER = Signer("RSA-PSS", issuer=ROOT, authority=False, name="images")
STRANGER = Signer(number=2, name="stranger")
FIELD = "trusted_image_certificates"


@pytest.fixture(autouse=True)
def certificates(cloud: OneProcess) -> None:
    """The certificates of this cloud, by their ids."""
    directory = cloud.process.directory.path / "certificates"
    directory.mkdir(exist_ok=True)
    (directory / "root.pem").write_bytes(ROOT.pem)
    (directory / "images.der").write_bytes(SIGNER.der)
    (directory / "stranger").write_bytes(STRANGER.pem)
    (directory / "damaged.pem").write_bytes(b"no certificate")


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The outcomes of the verifications on hosts during the test."""
    outcomes: list[str] = []
    verify = DataVerifier.verify

    def noted(self: DataVerifier) -> None:
        outcomes.append("wrong")
        verify(self)
        outcomes[-1] = "right"

    monkeypatch.setattr(DataVerifier, "verify", noted)
    return outcomes


async def signed(user: Caller, signer: Signer = SIGNER, certificate: str = "images", **fields: Any) -> str:
    """Create an image with a signature of its data; return its id."""
    return await image(user, **{**signer.properties(DATA, certificate), **fields})


async def wrongly_signed(user: Caller, **fields: Any) -> str:
    """Create an image that gets the signature of other data when it is active."""
    id = await image(user, **fields)
    properties = SIGNER.properties(b"other data", "images")
    changes = [{"op": "add", "path": f"/{name}", "value": value} for name, value in properties.items()]
    kind = {"content-type": "application/openstack-images-v2.1-json-patch"}
    answer = await call(user, "PATCH", f"/image/v2/images/{id}", changes, kind)
    assert answer.status == 200, answer.body
    return id


async def refused(user: Caller, picture: str, trusted: list[str] | None = None) -> str:
    body = user.body(imageRef=picture, trusted_image_certificates=trusted or ["images"])
    return await user.refused(400, "POST", "/servers", body)


@pytest.mark.parametrize("trusted", [["images"], ["root"], ["missing", "damaged", "stranger", "root"]])
async def test_a_server_keeps_and_shows_what_it_trusts(
    cloud: Cloud, user: Caller, verified: list[str], trusted: list[str]
) -> None:
    server = await user.boot(imageRef=await signed(user), trusted_image_certificates=trusted)
    id = server["id"]
    assert verified == ["right", "right"]  # of the upload, and of the host
    assert server[FIELD] == trusted
    [listed] = (await user.at(63).get("/servers/detail"))["servers"]
    assert listed[FIELD] == (await user.put(f"/servers/{id}", {"server": {"name": "n"}}))["server"][FIELD] == trusted
    for path in (f"/servers/{id}", "/servers/detail"):
        assert FIELD not in str(await user.at(62).get(path))
    await user.delete(f"/servers/{id}")
    await user.gone(id)
    await cloud.assert_clean()


async def test_without_trusted_certificates_nothing_is_verified(user: Caller, verified: list[str]) -> None:
    server = await user.boot(imageRef=await wrongly_signed(user))
    assert server[FIELD] is None and verified == []


async def test_data_that_was_not_signed_is_refused_by_the_host(cloud: Cloud, user: Caller, verified: list[str]) -> None:
    picture = await wrongly_signed(user)
    id = await user.create(imageRef=picture, trusted_image_certificates=["images"])
    server = await user.wait_for(id, "ERROR")
    assert server["fault"]["message"] == f"The image {picture} is refused: its signature is not that of its data."
    assert verified == ["wrong"]  # no other host has tried
    for host in cloud.hosts:
        assert id not in await cloud.guests(host)
    # It is not trusted on any host because it was once used without being verified.
    await user.boot(imageRef=picture)
    again = [await user.create(imageRef=picture, trusted_image_certificates=["images"]) for _ in range(3)]
    for each in again:
        await user.wait_for(each, "ERROR")
    await cloud.delete_all()
    await cloud.assert_clean()


async def test_signatures_that_cannot_be_verified_are_refused_at_once(cloud: Cloud, user: Caller) -> None:
    unsigned = await image(user)
    assert "is not signed: it has no property img_signature," in await refused(user, unsigned)
    lost = await image(user, img_signature="x", img_signature_hash_method="SHA-256", img_signature_key_type="RSA-PSS")
    assert "it has no property img_signature_certificate_uuid" in await refused(user, lost)
    picture = await signed(user)
    for trusted in (["stranger"], ["missing"], ["../images"], ["damaged", "missing"]):
        assert "its certificate is none of the trusted ones" in await refused(user, picture, trusted)
    path = cloud.process.directory.path / "certificates" / "short-lived.pem"
    path.write_bytes(STRANGER.pem)
    other = await signed(user, STRANGER, "short-lived")
    path.write_bytes(Signer(days=(-3, -2), number=2).pem)
    assert "its certificate is valid from" in await refused(user, other, ["short-lived"])
    path.unlink()
    assert "There is no certificate 'short-lived'" in await refused(user, other, ["short-lived"])
    assert "booting from volume" in await user.refused(
        400, "POST", "/servers",
        user.body(imageRef=None, block_device_mapping_v2=[
            {"boot_index": 0, "source_type": "image", "destination_type": "volume", "uuid": picture, "volume_size": 1}
        ], trusted_image_certificates=["images"]),
    )  # fmt: skip
    assert (await user.get("/servers"))["servers"] == []
    await cloud.assert_clean()


async def _kept_image(cloud: Cloud, id: str) -> Any:
    [row] = await cloud.read(sa.select(instances.c.image).where(instances.c.uuid == id))
    return row.image


async def _rebuild(user: Caller, id: str, picture: str, *statuses: str, **fields: Any) -> dict[str, Any]:
    answer = await user.act(id, "rebuild", {"imageRef": picture, **fields})
    await user.wait_for(id, *(statuses or ("ACTIVE",)))
    return dict(answer["server"])


async def test_a_rebuild_verifies_with_what_the_server_trusts(cloud: Cloud, user: Caller, verified: list[str]) -> None:
    first, second, unsigned = await signed(user), await signed(user), await image(user)
    id = (await user.boot(imageRef=first, trusted_image_certificates=["images"]))["id"]
    verified.clear()
    assert (await _rebuild(user, id, second))[FIELD] == ["images"]
    assert verified == ["right"]
    body = {"rebuild": {"imageRef": unsigned}}
    assert "is not signed" in await user.refused(400, "POST", f"/servers/{id}/action", body)
    assert (await _rebuild(user, id, second, trusted_image_certificates=["root"]))[FIELD] == ["root"]
    assert (await _rebuild(user, id, unsigned, trusted_image_certificates=None))[FIELD] is None
    assert verified == ["right"]  # the same image on the same host is not verified again
    assert (await _rebuild(user, id, first, trusted_image_certificates=["images"]))[FIELD] == ["images"]
    answer = await user.at(62).act(id, "rebuild", {"imageRef": first})
    assert FIELD not in answer["server"]
    await user.wait_for(id, "ACTIVE")


async def test_a_rebuild_with_wrong_data_leaves_the_guest_as_it_is(cloud: Cloud, user: Caller) -> None:
    first, wrong = await signed(user), await wrongly_signed(user)
    id = (await user.boot(imageRef=first, trusted_image_certificates=["images"]))["id"]
    host = await user.host_of(id)
    before = (await cloud.guests(host))[id]
    kept = await _kept_image(cloud, id)
    await _rebuild(user, id, wrong, "ERROR")
    server = await user.show(id)
    assert "its signature is not that of its data" in server["fault"]["message"]
    assert server["image"]["id"] == first
    assert (await cloud.guests(host))[id] == before
    assert await _kept_image(cloud, id) == kept  # with its signature, which the next host verifies
    await _rebuild(user, id, first)
    await cloud.assert_clean()


async def test_rescue_images_are_verified_too(cloud: Cloud, user: Caller, verified: list[str]) -> None:
    id = (await user.boot(imageRef=await signed(user), trusted_image_certificates=["images"]))["id"]
    path = f"/servers/{id}/action"
    body = {"rescue": {"rescue_image_ref": await image(user)}}
    assert "is not signed" in await user.refused(400, "POST", path, body)
    await user.act(id, "rescue", {"rescue_image_ref": await wrongly_signed(user)}, 200)
    failed = await user.wait_for(id, "ERROR")
    assert "its signature is not that of its data" in failed["fault"]["message"]
    await user.admin.act(id, "os-resetState", {"state": "active"})
    good = await signed(user)
    verified.clear()
    await user.act(id, "rescue", {"rescue_image_ref": good}, 200)
    await user.wait_for(id, "RESCUE")
    assert verified == ["right"]
    await user.act(id, "unrescue")
    await user.wait_for(id, "ACTIVE")
    await user.act(id, "rescue", None, 200)  # from the server's own image, which the host has verified
    await user.wait_for(id, "RESCUE")
    assert verified == ["right"]


async def test_moves_and_images_of_the_server(cloud: Cloud, user: Caller, verified: list[str]) -> None:
    id = (await user.boot(imageRef=await signed(user), trusted_image_certificates=["images"]))["id"]
    verified.clear()
    await user.admin.act(id, "migrate")
    await user.wait_for(id, "VERIFY_RESIZE")
    await user.act(id, "confirmResize", None, 204)
    await user.wait_for(id, "ACTIVE")
    await user.act(id, "shelve")
    await user.wait_for(id, "SHELVED_OFFLOADED")
    await user.act(id, "unshelve")
    server = await user.wait_for(id, "ACTIVE")
    assert server[FIELD] == ["images"]
    assert verified == []  # disks are sent from host to host, and an image of the server's own disk has no signature
    made = (await user.act(id, "createImage", {"name": "copy"}))["image_id"]
    await user.wait_for(id, "ACTIVE")
    assert not [name for name in await ok(user, "GET", f"/image/v2/images/{made}") if name.startswith("img_sig")]
    assert "is not signed" in await refused(user, made)


# --- the image service ---------------------------------------------------------------------------------------------


async def _status(user: Caller, id: str) -> str:
    return str((await ok(user, "GET", f"/image/v2/images/{id}"))["status"])


async def test_the_image_service_verifies_what_is_uploaded(user: Caller) -> None:
    id = await signed(user, upload=False)
    path = f"/image/v2/images/{id}/file"
    answer = await call(user, "PUT", path, b"other data", OCTETS)
    assert answer.status == 400
    assert f"Signature verification failed for image {id}: its signature is not that of its data." in str(answer.body)
    assert await _status(user, id) == "queued"
    assert (await call(user, "PUT", path, DATA, OCTETS)).status == 204
    assert await _status(user, id) == "active"
    unknown = await signed(user, certificate="missing", upload=False)
    answer = await call(user, "PUT", f"/image/v2/images/{unknown}/file", DATA, OCTETS)
    assert answer.status == 400 and b"There is no certificate 'missing'" in answer.body
    await image(user, img_signature="not all four properties")


async def test_the_image_service_verifies_what_is_imported(user: Caller) -> None:
    body = {"method": {"name": "glance-direct"}}
    for data, status, after in ((b"other data", 400, "uploading"), (DATA, 202, "active")):
        id = await signed(user, upload=False)
        assert (await call(user, "PUT", f"/image/v2/images/{id}/stage", data, OCTETS)).status == 204
        answer = await call(user, "POST", f"/image/v2/images/{id}/import", body)
        assert answer.status == status, answer.body
        assert await _status(user, id) == after


async def test_an_image_with_a_property_named_signature_is_like_any_other(user: Caller) -> None:
    await user.boot(imageRef=await image(user, signature=uuid.uuid4().hex))
