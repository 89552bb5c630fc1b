"""Signatures of requests with an EC2 credential: the versions 2 and 4 of Amazon's, as Keystone checks them.

A service that received a signed request asks the identity service about it, because it does not know the secret.
"""

import hashlib
import hmac
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from micronova.objects.errors import Unauthorized

WINDOW = 900.0  # seconds that a request may be older or newer than our clock says
_ALGORITHM = "AWS4-HMAC-SHA256"


class SignedRequest(Struct):
    """A request that a client has signed, as the service that received it describes it."""

    access: str = ""
    signature: str = ""
    verb: str = ""
    host: str = ""
    path: str = ""
    params: dict[str, Any] = {}
    headers: dict[str, str] = {}
    body_hash: str = ""  # SHA-256 of the body, in hex


def check(request: SignedRequest, secret: str, now: float) -> None:
    """Raise Unauthorized unless the request was signed with the secret, within the last minutes."""
    if not request.signature:
        raise Unauthorized("The EC2 signature is missing.")
    if request.params.get("SignatureVersion") == "2":
        signed_at = str(request.params.get("Timestamp", ""))
        # Some clients sign the name of the host without the port.
        expected = [_version_2(request, secret, host) for host in (request.host, _without_port(request.host))]
    elif _is_version_4(request):
        signed_at = _date(request)
        expected = [_version_4(request, secret)]
    else:
        raise Unauthorized("The EC2 signature is of no known version: sign with version 2 or 4.")
    if not any(hmac.compare_digest(request.signature.encode(), each.encode()) for each in expected):
        raise Unauthorized("The EC2 signature is wrong.")
    _check_time(signed_at, now)


def _check_time(text: str, now: float) -> None:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise Unauthorized("The signed request has no valid time (Timestamp or X-Amz-Date).") from None
    signed_at = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    if abs(now - signed_at) > WINDOW:
        raise Unauthorized(f"The request was not signed within the last {WINDOW / 60:g} minutes.")


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def _query(params: Mapping[str, Any]) -> str:
    pairs = sorted((name, value) for name, value in params.items() if name not in ("Signature", "X-Amz-Signature"))
    return "&".join(f"{quote(name, safe='')}={quote(str(value), safe='')}" for name, value in pairs)


def _version_2(request: SignedRequest, secret: str, host: str) -> str:
    query = _query({**request.params, "SignatureMethod": "HmacSHA256"})
    signed = "\n".join((request.verb, host, request.path, query))
    return b64encode(_hmac(secret.encode(), signed)).decode()


def _is_version_4(request: SignedRequest) -> bool:
    if "Authorization" in request.headers:
        return request.headers["Authorization"].startswith(_ALGORITHM)
    return request.params.get("X-Amz-Algorithm") == _ALGORITHM


def _parameter(request: SignedRequest, name: str) -> str:
    """Return a parameter of the signature, from the header Authorization or from the query string."""
    if "Authorization" in request.headers:
        return request.headers["Authorization"].partition(f"{name}=")[2].partition(",")[0].strip()
    return str(request.params.get(f"X-Amz-{name}", ""))


def _date(request: SignedRequest) -> str:
    return request.headers.get("X-Amz-Date") or str(request.params.get("X-Amz-Date", ""))


def _version_4(request: SignedRequest, secret: str) -> str:
    access, *scope = _parameter(request, "Credential").split("/")
    date = _date(request)
    if access != request.access or len(scope) != 4 or not date.startswith(scope[0]):
        raise Unauthorized("The scope of the EC2 signature is not that of the request.")
    names = _parameter(request, "SignedHeaders")
    sent = {name.lower().strip(): value.strip() for name, value in request.headers.items()}
    headers = "".join(f"{name}:{sent[name]}\n" for name in names.split(";") if name in sent)
    query = "" if request.verb.upper() == "POST" else _query(request.params)
    canonical = "\n".join((request.verb.upper(), request.path, query, headers, names, request.body_hash))
    signed = "\n".join((_ALGORITHM, date, "/".join(scope), hashlib.sha256(canonical.encode()).hexdigest()))
    key = f"AWS4{secret}".encode()
    for part in (*scope[:3], "aws4_request"):
        key = _hmac(key, part)
    return _hmac(key, signed).hex()


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
