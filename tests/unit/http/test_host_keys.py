"""The keys of compute hosts: whose they are, how long they are good, and how a host keeps them."""

import base64

import pytest

from micronova.http.host_keys import LIFETIME, RETRY_INTERVAL, HeldKeys, HostKeyring, HostTickets, sign_metadata
from micronova.objects.context import RequestContext
from micronova.objects.errors import Forbidden, MicronovaError, Unauthorized, Unavailable
from micronova.objects.host_keys import HostKeys
from tests.unit.embedded.network.world import ALICE
from tests.unit.embedded.tokens import Tokens

KEYRING = HostKeyring(b"0123456789abcdef")
NOW = 1_800_000_000.0
CONTEXT = RequestContext(request_id="req-1")


@pytest.mark.parametrize("host", ["compute-17", "h", "host.example.org", "größe", "a b\n", "x" * 255])
def test_a_ticket_says_whose_it_is(host: str) -> None:
    ticket = KEYRING.issue(host, NOW).ticket
    assert ticket.isascii() and ticket.isprintable()
    assert KEYRING.host_of(ticket, NOW) == KEYRING.host_of(ticket, NOW + LIFETIME - 1) == host
    with pytest.raises(Unauthorized, match=r"or no longer: .* need the same neutron\.ticket_key"):
        KEYRING.host_of(ticket, NOW + LIFETIME)
    with pytest.raises(Unauthorized):
        HostKeyring(b"fedcba9876543210").host_of(ticket, NOW)


def test_a_ticket_cannot_be_made_into_another() -> None:
    ticket = KEYRING.issue("compute-17", NOW).ticket
    prefix, name, expiry, signature = ticket.split(".")
    other = base64.urlsafe_b64encode(b"compute-18").decode().rstrip("=")
    key = KEYRING.issue("compute-17", NOW).metadata_key
    forged = [
        f"{prefix}.{other}.{expiry}.{signature}", f"{prefix}.{name}.{int(expiry) + 1}.{signature}",
        f"{prefix}.{name}.{expiry}.{signature[::-1]}", f"{prefix}.{name}.{key}", f"{prefix}.{name}.{expiry}",
        f"{prefix}.{name}.", f"{prefix}.", f"{prefix}..{expiry}.{signature}", f"{prefix}.\xff.{expiry}.{signature}",
        f"{prefix}./w.{expiry}.{signature}", f"{prefix}.{name}!.{expiry}.{signature}", f"{ticket}\n", f"{ticket}.",
        f"{prefix}.{'A' * 5000}.{expiry}.{signature}",
    ]  # fmt: skip
    for each in forged:
        with pytest.raises(Unauthorized):
            KEYRING.host_of(each, NOW)


def test_the_metadata_key_is_of_one_host_and_moment() -> None:
    keys = KEYRING.issue("compute-17", NOW)
    assert keys.expires_at == NOW + LIFETIME
    assert keys.metadata_key == KEYRING.metadata_key("compute-17", keys.expires_at)
    others = {
        KEYRING.metadata_key("compute-18", keys.expires_at),
        KEYRING.metadata_key("compute-17", keys.expires_at + 1),
        HostKeyring(b"fedcba9876543210").metadata_key("compute-17", keys.expires_at),
        KEYRING.issue("metadata\ncompute-17", NOW).ticket,
    }
    assert len(others) == 4 and keys.metadata_key not in others


def test_a_signature_covers_all_that_is_said() -> None:
    said = ("key", "host", "server", "project", "10.0.0.1")
    signature = sign_metadata(*said)
    for place in range(len(said)):
        changed = [*said]
        changed[place] += "x"
        assert sign_metadata(*changed) != signature
    assert sign_metadata("key", "host", "server", "project10.0.0.1", "") != signature


async def test_others_come_with_tokens_as_before() -> None:
    authenticator = HostTickets(KEYRING, Tokens(), lambda: NOW)
    host = await authenticator.authenticate(KEYRING.issue("compute-17", NOW).ticket, CONTEXT)
    assert (host.host, host.user_id, host.roles, host.request_id) == ("compute-17", "", (), "req-1")
    user = await authenticator.authenticate(ALICE, CONTEXT)
    assert (user.host, user.user_id) == ("", "alice")
    for token in (None, "", "mnh1.", KEYRING.issue("compute-17", NOW - 2 * LIFETIME).ticket):
        with pytest.raises(Unauthorized):
            await authenticator.authenticate(token, CONTEXT)


class Conductor:
    """Gives keys out, unless it is away."""

    def __init__(self) -> None:
        self.now = NOW
        self.asked = 0
        self.error: MicronovaError | None = None
        self.held = HeldKeys("compute-17", self._fetch, lambda: self.now)

    async def _fetch(self) -> HostKeys:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return KEYRING.issue("compute-17", self.now)

    async def expiry(self) -> float:
        """Return when what the host uses now runs out."""
        return float((await self.held.ticket()).split(".")[2])


async def test_keys_are_renewed_long_before_they_run_out() -> None:
    conductor = Conductor()
    for _ in range(3):
        assert await conductor.expiry() == NOW + LIFETIME
    assert conductor.asked == 1
    conductor.now += LIFETIME / 3
    assert await conductor.expiry() == conductor.now + LIFETIME
    assert conductor.asked == 2


async def test_a_host_goes_on_while_conductors_are_away() -> None:
    conductor = Conductor()
    await conductor.expiry()
    conductor.error = Unavailable("nobody there")
    conductor.now += LIFETIME / 2
    for _ in range(3):
        assert await conductor.expiry() == NOW + LIFETIME
    assert conductor.asked == 2, "it does not ask each time"
    conductor.now += RETRY_INTERVAL
    await conductor.expiry()
    assert conductor.asked == 3
    conductor.now = NOW + LIFETIME
    with pytest.raises(Unavailable, match="nobody there"):
        await conductor.expiry()
    conductor.error = None
    assert await conductor.expiry() == conductor.now + LIFETIME


async def test_a_host_that_is_thrown_out_has_nothing_more() -> None:
    conductor = Conductor()
    await conductor.expiry()
    conductor.error = Forbidden("no host of this cloud")
    conductor.now += LIFETIME / 3
    with pytest.raises(Forbidden):
        await conductor.expiry()


async def test_refused_keys_are_exchanged_but_not_in_a_flood() -> None:
    conductor = Conductor()
    await conductor.expiry()
    conductor.held.forget()
    await conductor.expiry()
    assert conductor.asked == 1
    conductor.now += RETRY_INTERVAL
    conductor.held.forget()
    assert await conductor.expiry() == conductor.now + LIFETIME
    assert conductor.asked == 2
