"""Nothing secret in the log, at its lowest level, of a cloud that does many things with secrets."""

import base64
import logging
from collections.abc import AsyncIterator, Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
import pytest_asyncio

from micronova.http.access_log import AccessLog
from micronova.http.client import ASGITransport
from micronova.http.proxies import TrustedProxies
from micronova.telemetry.logs import JSONLines, TextLines
from tests.functional.full_cloud import FullCloud
from tests.people import Person

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET_KEY = "5ec2e7" * 10 + "abcd"
PASSWORDS = ("admin-pass-of-server-1", "pass-of-rescue-2", "pass-of-person-3", "changed-pass-4", "wrong-pass-5")


class _Lines(logging.Handler):
    """Keeps every line, in both formats."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.text += [each.format(record) for each in (TextLines(), JSONLines())]


@pytest.fixture(scope="module")
def logged() -> Iterator[_Lines]:
    root, handler = logging.getLogger(), _Lines()
    before = root.level
    root.setLevel(logging.DEBUG)
    root.addHandler(handler)
    yield handler
    root.removeHandler(handler)
    root.setLevel(before)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cloud(tmp_path_factory: pytest.TempPathFactory, logged: _Lines) -> AsyncIterator[FullCloud]:
    made = FullCloud(tmp_path_factory.mktemp("secrets"), default={"secret_key": SECRET_KEY, "report_interval": 0.5})
    await made.start()
    app = AccessLog(made.process.application(), made.process.clock, TrustedProxies(), on=True)
    made.transport = ASGITransport(app, "cloud:8774")
    yield made
    await made.stop()


async def _server(person: Person, image: str, **fields: object) -> str:
    flavor = next(each["id"] for each in (await person.do("GET", "/compute/v2.1/flavors"))["flavors"])
    body = {"server": {"name": "s", "imageRef": image, "flavorRef": flavor, "networks": "none", **fields}}
    return str((await person.do("POST", "/compute/v2.1/servers", body))["server"]["id"])


async def _reaches(cloud: FullCloud, person: Person, server: str, status: str) -> None:
    async def reached() -> bool | None:
        shown = (await person.do("GET", f"/compute/v2.1/servers/{server}"))["server"]
        return True if shown["status"] == status and shown["OS-EXT-STS:task_state"] is None else None

    await cloud.until(reached, f"the server to be {status}")


async def test_no_secret_is_logged(cloud: FullCloud, logged: _Lines) -> None:
    person = await cloud.person("member", "reader")
    assert person.token is not None and cloud.admin.token is not None
    secrets = {person.token, cloud.admin.token, SECRET_KEY, *PASSWORDS}
    keys = cloud.process.keys
    secrets |= {value for value in (keys.admin_password, keys.service_password) if value}
    image = await person.make_image("i", "raw", b"\0" * 4096)

    # A server with a password, user data and a key pair that the cloud makes.
    user_data = base64.b64encode(b"user-data-of-server-6").decode()
    secrets |= {user_data, "user-data-of-server-6"}
    server = await _server(person, image, adminPass=PASSWORDS[0], user_data=user_data)
    await _reaches(cloud, person, server, "ACTIVE")
    actions = f"/compute/v2.1/servers/{server}/action"
    await person.do("POST", actions, {"changePassword": {"adminPass": PASSWORDS[3]}})
    await _reaches(cloud, person, server, "ACTIVE")
    await person.do("POST", actions, {"rescue": {"adminPass": PASSWORDS[1]}})
    await _reaches(cloud, person, server, "RESCUE")
    await person.do("POST", actions, {"unrescue": None})
    await _reaches(cloud, person, server, "ACTIVE")

    # Old microversions: injected files, and key pairs that the cloud makes.
    content = base64.b64encode(b"file-of-server-7").decode()
    secrets |= {content, "file-of-server-7"}
    made = await person.request("POST", "/compute/v2.1/os-keypairs", {"keypair": {"name": "k"}}, minor=1)
    secrets |= set(made.json()["keypair"]["private_key"].splitlines()[1:-1])
    flavor = next(each["id"] for each in (await person.do("GET", "/compute/v2.1/flavors"))["flavors"])
    files = [{"path": "/etc/f", "contents": content}]
    body = {"name": "old", "imageRef": image, "flavorRef": flavor, "key_name": "k", "personality": files}
    answer = await person.request("POST", "/compute/v2.1/servers", {"server": body}, minor=1)
    assert answer.status == 202, answer.body
    secrets.add(answer.json()["server"]["adminPass"])

    # A console, by its token.
    console = {"remote_console": {"protocol": "vnc", "type": "novnc"}}
    answer = await person.request("POST", f"/compute/v2.1/servers/{server}/remote-consoles", console)
    assert answer.status == 200, answer.body
    query = parse_qs(urlsplit(answer.json()["remote_console"]["url"]).query)
    token = parse_qs(urlsplit(query["path"][0]).query)["token"][0] if "path" in query else query["token"][0]
    secrets.add(token)
    page = urlsplit(answer.json()["remote_console"]["url"])
    await cloud.anonymous.request("GET", f"{page.path}?{page.query}")
    await cloud.admin.request("GET", f"/compute/v2.1/os-console-auth-tokens/{token}")

    # An encrypted volume, by its key: also as the bytes that it stands for.
    volume_type = (await cloud.admin.do("POST", "/volume/v3/types", {"volume_type": {"name": "LUKS"}}))["volume_type"][
        "id"
    ]
    encryption = {"encryption": {"provider": "luks", "control_location": "front-end"}}
    await cloud.admin.do("POST", f"/volume/v3/types/{volume_type}/encryption", encryption)
    asked = {"volume": {"size": 1, "volume_type": "LUKS"}}
    volume = (await person.do("POST", "/volume/v3/volumes", asked))["volume"]["id"]

    async def made_volume() -> bool | None:
        return (await person.do("GET", f"/volume/v3/volumes/{volume}"))["volume"]["status"] == "available" or None

    await cloud.until(made_volume, "the volume to be made")
    attached = f"/compute/v2.1/servers/{server}/os-volume_attachments"
    await person.request("POST", attached, {"volumeAttachment": {"volumeId": volume}}, minor=100)
    client = cloud.process.clients.volume_client()
    assert client is not None
    key = await client.encryption_key(volume)
    secrets |= {key, base64.b64encode(bytes.fromhex(key)).decode()}

    # Identity: users, application credentials, EC2 credentials, log-ins that fail.
    user = {"name": "u3", "password": PASSWORDS[2], "domain_id": "default"}
    user_id = (await cloud.admin.do("POST", "/identity/v3/users", {"user": user}))["user"]["id"]
    path = f"/identity/v3/users/{person.user_id}/application_credentials"
    credential = {"application_credential": {"name": "a", "secret": "secret-of-credential-8"}}
    secrets.add("secret-of-credential-8")
    assert (await person.request("POST", path, credential)).status == 201
    wrong = {"methods": ["password"], "password": {"user": {"id": user_id, "password": PASSWORDS[4]}}}
    assert (
        await cloud.anonymous.request("POST", "/identity/v3/auth/tokens", {"auth": {"identity": wrong}})
    ).status == 401
    assert (await person.request("GET", "/compute/v2.1/servers?token=query-token-9")).status in (200, 400)
    secrets.add("query-token-9")
    blob = {"credential": {"type": "cert", "blob": "blob-of-credential-10", "user_id": person.user_id}}
    await cloud.admin.do("POST", "/identity/v3/credentials", blob)
    secrets.add("blob-of-credential-10")

    shown = (await person.request("GET", attached)).body + (await cloud.admin.request("GET", attached)).body
    assert volume.encode() in shown and key.encode() not in shown
    await person.do("DELETE", f"/compute/v2.1/servers/{server}")
    await cloud.settled()
    text = "\n".join(logged.text)
    assert "POST /servers is accepted with 202" in text and "http.access" in text and len(logged.text) > 200
    assert [secret for secret in secrets if secret in text] == []
