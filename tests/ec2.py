"""Signs requests with an EC2 credential as Amazon's clients do, for tests."""

import base64
import hashlib
import hmac
import urllib.parse
from datetime import UTC, datetime
from typing import Any

REGION = "RegionOne/ec2/aws4_request"


def _sha256(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def _encoded(params: dict[str, str]) -> str:
    return "&".join(f"{name}={urllib.parse.quote(params[name], safe='-_.~')}" for name in sorted(params))


def version_2(access: str, secret: str, time: float, **changed: Any) -> dict[str, Any]:
    """Return a GET with a signature of version 2, as a service describes it to the identity service."""
    params = {
        "Action": "DescribeInstances", "AWSAccessKeyId": access, "SignatureVersion": "2",
        "SignatureMethod": "HmacSHA256", "Filter.1.Name": "a b/ü",
        "Timestamp": datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }  # fmt: skip
    text = f"GET\nec2.example\n/services/Cloud/\n{_encoded(params)}"
    signature = base64.b64encode(_sha256(secret.encode(), text)).decode()
    request = {"verb": "GET", "host": "ec2.example:8788", "path": "/services/Cloud/", "params": params}
    return {"access": access, "signature": signature, **request, **changed}


def version_4(access: str, secret: str, time: float, in_query: bool = False, **changed: Any) -> dict[str, Any]:
    """Return a request with a signature of version 4: a POST with it in a header, or a GET with it in the query."""
    stamp = datetime.fromtimestamp(time, UTC).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{stamp[:8]}/{REGION}"
    verb, query, body_hash = "POST", "", hashlib.sha256(b"Action=DescribeInstances").hexdigest()
    headers, params = {"Host": "ec2.example:8788"}, {"Action": "DescribeInstances"}
    signed = "host"
    if in_query:
        verb, body_hash = "GET", hashlib.sha256(b"").hexdigest()
        params |= {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256", "X-Amz-Credential": f"{access}/{scope}", "X-Amz-Date": stamp,
            "X-Amz-SignedHeaders": signed,
        }  # fmt: skip
        query = _encoded(params)
    else:
        headers["X-Amz-Date"] = stamp
        signed = "host;x-amz-date"
    names = {name.lower(): value for name, value in headers.items()}
    lines = "".join(f"{name}:{names[name]}\n" for name in signed.split(";"))
    canonical = f"{verb}\n/\n{query}\n{lines}\n{signed}\n{body_hash}"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = b"AWS4" + secret.encode()
    for part in scope.split("/"):
        key = _sha256(key, part)
    signature = _sha256(key, f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}").hex()
    if not in_query:
        headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={access}/{scope}, SignedHeaders={signed}, Signature={signature}"
        )
    request = {"verb": verb, "host": headers["Host"], "path": "/", "params": params, "headers": headers}
    return {"access": access, "signature": signature, **request, "body_hash": body_hash, **changed}
