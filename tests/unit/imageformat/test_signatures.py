"""Signatures of images, and which certificates are trusted."""

import subprocess
from pathlib import Path

import pytest

from micronova.imageformat.signatures import (
    HASH_METHODS,
    KEY_TYPES,
    LARGEST_CERTIFICATE,
    PROPERTIES,
    check_trusted,
    is_signed,
    read_signature,
    verify_file,
)
from micronova.objects.clock import SystemClock
from micronova.objects.errors import Invalid
from tests.certificates import Signer

DATA = b"the data of an image" * 100_000
NOW = SystemClock().now()


def refused(signer: Signer, **properties: str) -> str:
    with pytest.raises(Invalid) as error:
        read_signature({**signer.properties(DATA, "c1"), **properties}, signer.pem)
    return error.value.message


@pytest.mark.parametrize("method", HASH_METHODS)
@pytest.mark.parametrize("kind", KEY_TYPES)
def test_each_key_type_and_hash(tmp_path: Path, kind: str, method: str) -> None:
    signer = Signer(kind)
    file = tmp_path / "image"
    file.write_bytes(DATA)
    properties = signer.properties(DATA, "c1", method)
    assert is_signed(properties)
    verify_file(file, read_signature(properties, signer.pem))
    verify_file(file, read_signature(properties, signer.der))
    for other in (DATA[:-1], DATA + b"\0", b"X" + DATA[1:], b""):
        file.write_bytes(other)
        with pytest.raises(Invalid, match="not that of its data"):
            verify_file(file, read_signature(properties, signer.pem))


def test_what_openssl_signs_is_verified(tmp_path: Path) -> None:
    """By the commands of the documentation."""
    (tmp_path / "image").write_bytes(DATA)
    commands = (
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=images",
        "openssl dgst -sha256 -sigopt rsa_padding_mode:pss -sign key.pem -out signature image",
        "openssl base64 -A -in signature -out signature.base64",
    )
    for command in commands:
        subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    properties = {
        "img_signature": (tmp_path / "signature.base64").read_text(),
        "img_signature_hash_method": "SHA-256",
        "img_signature_key_type": "RSA-PSS",
        "img_signature_certificate_uuid": "c1",
    }
    certificate = (tmp_path / "cert.pem").read_bytes()
    verify_file(tmp_path / "image", read_signature(properties, certificate))
    check_trusted(certificate, [certificate], SystemClock().now())


def test_the_key_of_another_certificate(tmp_path: Path) -> None:
    file = tmp_path / "image"
    file.write_bytes(DATA)
    properties = Signer().properties(DATA, "c1")
    with pytest.raises(Invalid, match="not that of its data"):
        verify_file(file, read_signature(properties, Signer(number=1).pem))


def test_properties_that_are_wrong() -> None:
    signer = Signer()
    for name in PROPERTIES:
        properties = signer.properties(DATA, "c1")
        del properties[name]
        assert not is_signed(properties)
        with pytest.raises(Invalid, match=f"not signed: it has no property {name}"):
            read_signature(properties, signer.pem)
    assert "one of SHA-224" in refused(signer, img_signature_hash_method="MD5")
    assert "one of RSA-PSS" in refused(signer, img_signature_key_type="ECC_SECT571K1")
    assert "not a signature in base64" in refused(signer, img_signature="*")
    assert "not a signature in base64" in refused(signer, img_signature="A" * 5000)
    for kind in ("RSA-PSS", "DSA", "ECC_SECP521R1"):
        assert f"not of the type {kind}" in refused(signer, img_signature_key_type=kind)
    for content in (b"", b"x", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----", b"\0" * 70_000):
        with pytest.raises(Invalid, match=r"neither X\.509 in PEM nor in DER"):
            read_signature(signer.properties(DATA, "c1"), content)
    assert LARGEST_CERTIFICATE < 70_000


def untrusted(signing: Signer, *trusted: bytes) -> str:
    with pytest.raises(Invalid) as error:
        check_trusted(signing.pem, trusted, NOW)
    return error.value.message


def test_a_certificate_is_trusted_itself_or_by_its_authority() -> None:
    root = Signer(name="root")
    middle = Signer(issuer=root, number=1, name="middle")
    leaf = Signer("RSA-PSS", issuer=middle, authority=False, name="leaf")
    stranger = Signer(number=2, name="middle")
    check_trusted(leaf.pem, [leaf.der], NOW)
    check_trusted(leaf.der, [stranger.pem, b"no certificate", middle.pem], NOW)
    check_trusted(middle.pem, [root.pem], NOW)
    assert "none of the trusted ones" in untrusted(leaf)
    assert "none of the trusted ones" in untrusted(leaf, stranger.pem)  # of the same name
    assert "none of the trusted ones" in untrusted(leaf, root.pem)  # the certificate between them is not trusted


def test_who_is_no_authority_cannot_vouch_for_others() -> None:
    plain = Signer(authority=False, name="plain")
    leaf = Signer(issuer=plain, number=1, authority=False, name="leaf")
    assert "none of the trusted ones" in untrusted(leaf, plain.pem)
    check_trusted(plain.pem, [plain.pem], NOW)


@pytest.mark.parametrize("days", [(-3, -2), (2, 3)])
def test_certificates_that_are_not_valid_now(days: tuple[int, int]) -> None:
    root = Signer(name="root", days=days)
    leaf = Signer(issuer=root, number=1, name="leaf")
    assert "none of the trusted ones" in untrusted(leaf, root.pem)
    late = Signer(days=days)
    assert "is valid from" in untrusted(late, late.pem)
