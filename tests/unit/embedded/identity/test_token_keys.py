"""The keys that sign tokens are exchanged without logging anybody out."""

import base64
import stat
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from micronova.cli.main import main
from micronova.cli.state import StateDirectory
from micronova.clients.identity.client import IdentityClient, ServiceToken
from micronova.http.auth import EitherTokens, KeystoneTokens, SignedTokens
from micronova.http.tokens import PREFIX, Claims, Revocations, TokenKey, TokenSigner, TokenVerifier, UnknownKey, key_id
from micronova.objects.context import RequestContext
from micronova.objects.errors import Unauthorized
from tests.clocks import HeldClock
from tests.unit.embedded.identity.harness import SERVICE, cloud_at, sqlite_at

LIFETIME = 3600.0
CONTEXT = RequestContext(request_id="")


def claims_of(token: str) -> Claims:
    text = token.removeprefix(PREFIX)
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    return msgspec.msgpack.decode(data[:-64], type=Claims)


async def test_tokens_live_through_a_rotation(tmp_path: Path, clock: HeldClock) -> None:
    place = StateDirectory(tmp_path)
    first = place.token_keys()
    async with cloud_at(
        sqlite_at(tmp_path), clock=clock, token_keys=place.token_keys, token_lifetime=LIFETIME
    ) as cloud:
        identity = cloud.identity
        old = await cloud.admin()
        assert claims_of(old.token or "").key_id == key_id(first[0].public)
        place.rotate_token_key(clock.now(), clock.now() + 120, LIFETIME)
        identity.load_keys()
        early = await cloud.admin()
        assert claims_of(early.token or "").key_id == key_id(first[0].public), "the new key does not sign yet"
        clock.time += 121
        new = await cloud.admin()
        assert claims_of(new.token or "").key_id == key_id(place.token_keys()[1].public)
        for caller in (old, early, new):
            assert (await caller.request("GET", "/auth/tokens", subject=caller.token or "")).status == 200
        clock.time += LIFETIME + 1
        identity.load_keys()
        forged = TokenSigner(first).sign(msgspec.structs.replace(claims_of(new.token or ""), expires_at=9e9))
        with pytest.raises(UnknownKey):
            identity.verifier.verify(forged, clock.now())
        assert (await (await cloud.admin()).request("GET", "/users")).status == 200


def test_a_process_accepts_a_key_before_another_signs_with_it(tmp_path: Path) -> None:
    place = StateDirectory(tmp_path)
    place.rotate_token_key(1000.0, 1120.0, LIFETIME)
    keys = place.token_keys()
    verifier = TokenVerifier([key.public for key in keys], Revocations())
    for now in (1000.0, 1119.0, 1121.0):
        claims = Claims(
            user_id="u", user_name="u", user_domain_id="d", issued_at=now, expires_at=now + 60, audit_ids=("a",)
        )
        token = TokenSigner(keys).sign(claims)
        assert verifier.verify(token, now).key_id == key_id(keys[now > 1120].public)


def test_a_key_is_erased_when_its_tokens_have_expired(tmp_path: Path) -> None:
    place = StateDirectory(tmp_path)
    first = place.keys().token_key
    place.rotate_token_key(1000.0, 1120.0, LIFETIME)
    place.rotate_token_key(2000.0, 2120.0, LIFETIME)
    assert len(place.token_keys()) == 3
    place.rotate_token_key(1121.0 + LIFETIME, 1241.0 + LIFETIME, LIFETIME)
    assert len(place.token_keys()) == 3 and first not in (tmp_path / "keys.json").read_text()
    assert stat.S_IMODE((tmp_path / "keys.json").stat().st_mode) == 0o600


def test_a_token_of_an_older_release_names_no_key() -> None:
    key, other = TokenKey(TokenKey.generate()), TokenKey(TokenKey.generate(), 5.0)
    claims = Claims(user_id="u", user_name="u", user_domain_id="d", issued_at=0, expires_at=9, audit_ids=("a",))
    payload = msgspec.msgpack.encode(claims)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    signature = Ed25519PrivateKey.from_private_bytes(key.private).sign(payload)
    token = PREFIX + base64.urlsafe_b64encode(payload + signature).decode().rstrip("=")
    assert TokenVerifier([other.public, key.public], Revocations()).verify(token, 1.0).user_id == "u"
    with pytest.raises(Unauthorized):
        TokenVerifier([other.public], Revocations()).verify(token, 1.0)


async def test_a_process_that_does_not_know_the_new_key_asks(tmp_path: Path, clock: HeldClock) -> None:
    place = StateDirectory(tmp_path)
    known = [key.public for key in place.token_keys()]
    async with cloud_at(sqlite_at(tmp_path), clock=clock, token_keys=place.token_keys) as cloud:
        user, password, project = SERVICE
        token = ServiceToken(cloud.transport, username=user, password=password, project_name=project, now=clock.now)
        asking = KeystoneTokens(IdentityClient(cloud.transport, token), clock.now)
        elsewhere = EitherTokens(SignedTokens(TokenVerifier(known, Revocations()), clock.now), asking)
        place.rotate_token_key(clock.now(), clock.now() + 60, LIFETIME)
        clock.time += 61
        cloud.identity.load_keys()
        admin = await cloud.admin()
        assert (await elsewhere.authenticate(admin.token, CONTEXT)).user_name == "admin"
        unknown = TokenSigner([TokenKey(TokenKey.generate())]).sign(claims_of(admin.token or ""))
        with pytest.raises(Unauthorized):
            await elsewhere.authenticate(unknown, CONTEXT)


def test_the_commands(tmp_path: Path) -> None:
    place = StateDirectory(tmp_path)
    runner = CliRunner()
    missing = runner.invoke(main, ["token-key", "rotate", "--dir", str(tmp_path)])
    assert missing.exit_code == 1 and "There is no cloud" in missing.output
    before = place.token_keys()
    done = runner.invoke(main, ["token-key", "rotate", "--dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    after = place.token_keys()
    assert after[:1] == before and len(after) == 2
    shown = runner.invoke(main, ["token-key", "show", "--dir", str(tmp_path)])
    assert shown.output == f'identity.public_key = "{after[0].public.hex()} {after[1].public.hex()}"\n'
    assert after[1].private.hex() not in done.output + shown.output
