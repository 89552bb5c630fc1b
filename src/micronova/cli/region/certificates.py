"""A region's own certificate authority, and one certificate for everything on the control node."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import click
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from micronova.cli.files import replace_files
from micronova.cli.region.plan import RegionPlan, host_of, read_plan
from micronova.objects.errors import MicronovaError

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 825


def make_certificates(plan: RegionPlan) -> None:
    """Write ca.pem, certificate.pem and key.pem into DIR/etc/tls, and the authority's key into DIR/authority."""
    plan.authority.parent.mkdir()
    _authority_key(plan).parent.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Micronova {plan.region_name}"[:64])])
    authority = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    replace_files({plan.authority: authority.public_bytes(Encoding.PEM), _authority_key(plan): _pem(key)})
    _make_certificate(plan, authority, key)


def renew_certificate(directory: Path) -> None:
    """Replace certificate.pem and key.pem in DIR/etc/tls; the authority stays, so that nobody has to be told of it."""
    plan = read_plan(directory)
    if not plan.tls:
        raise MicronovaError(f"The region in {plan.directory} was made without --tls: it has no certificate.")
    try:
        authority = x509.load_pem_x509_certificate(plan.authority.read_bytes())
        key = load_pem_private_key(_authority_key(plan).read_bytes(), None)
    except FileNotFoundError as error:
        raise MicronovaError(f"There is no {error.filename}: copy it back from where it is kept.") from None
    except ValueError as error:
        raise MicronovaError(
            f"{plan.authority} and {_authority_key(plan)} have to be the files of `region init`: {error}."
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
        raise MicronovaError(f"{_authority_key(plan)} is not the key of {plan.authority}: copy back the one that is.")
    ends = _make_certificate(plan, authority, key)
    click.echo(f"{plan.certificate} is good until {ends:%Y-%m-%d}, and {plan.certificate_key} is its key.")
    if plan.is_for_trial:
        click.echo(f"`micronova region reload --dir {plan.directory}` lets all processes use them.")
    else:
        click.echo("docs/tls.md says which machines need copies, and how their processes read them.")


def _authority_key(plan: RegionPlan) -> Path:
    return plan.directory / "authority" / "ca.key"


def _make_certificate(plan: RegionPlan, authority: x509.Certificate, signs: ec.EllipticCurvePrivateKey) -> datetime:
    """Write a new certificate and its key; return when it ends, which is not after its authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, plan.address[:64])])
    left = authority.not_valid_after_utc - datetime.now(UTC)
    if left.days < 1:
        raise MicronovaError(
            f"The authority {plan.authority} is good until {authority.not_valid_after_utc:%Y-%m-%d} only: make a new "
            "region's files with `micronova region init --tls` elsewhere, and use its authority and certificate."
        )
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    certificate = (
        _builder(subject, authority.subject, key.public_key(), min(CERTIFICATE_DAYS, left.days))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(_names(plan)), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(signs, hashes.SHA256())
    )
    replace_files({plan.certificate: certificate.public_bytes(Encoding.PEM), plan.certificate_key: _pem(key)})
    return certificate.not_valid_after_utc


def _names(plan: RegionPlan) -> list[x509.GeneralName]:
    """Return the names and addresses at which the services, the broker and the database are reached."""
    wanted = {plan.address, "localhost", "127.0.0.1", *map(host_of, (plan.database_place, *plan.brokers))}
    if public := urlsplit(plan.public_url).hostname:
        wanted.add(public)
    found: list[x509.GeneralName] = []
    for name in sorted(wanted):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name.strip("[]"))))
        except ValueError:
            found.append(x509.DNSName(name))
    return found


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of other machines may be behind
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
