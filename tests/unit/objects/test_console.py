"""Where a console proxy connects, whatever a compute host answers."""

import pytest

from micronova.objects.console import ConsoleEndpoint, at_registered_relay
from micronova.objects.errors import Unavailable

SECRET = "5c" * 32


@pytest.mark.parametrize(
    "answer",
    [
        ConsoleEndpoint(host="192.0.2.17", port=6080, secret=SECRET),
        ConsoleEndpoint(host="169.254.169.254", port=80, secret=SECRET),
        ConsoleEndpoint(host="127.0.0.1", port=5432, secret=SECRET),
        ConsoleEndpoint(path="/var/lib/micronova/console/other-guest.serial0", secret=SECRET),
    ],
)
def test_only_the_secret_of_a_hosts_answer_counts(answer: ConsoleEndpoint) -> None:
    relay = ConsoleEndpoint(host="192.0.2.17", port=6080, secret=SECRET)
    assert at_registered_relay(answer, "compute-17", "192.0.2.17:6080") == relay


def test_addresses_of_ipv6_lose_their_brackets() -> None:
    answer = ConsoleEndpoint(host="::1", port=1, secret=SECRET)
    assert at_registered_relay(answer, "h", "[2001:db8::17]:6080").host == "2001:db8::17"


@pytest.mark.parametrize(
    "secret", ["", "GET / HTTP/1.1\r\n\r\n", SECRET.upper(), SECRET + "0", SECRET + "\n", "é" * 64]
)
def test_what_is_no_secret_of_a_relay_is_not_sent(secret: str) -> None:
    answer = ConsoleEndpoint(host="192.0.2.17", port=6080, secret=secret)
    with pytest.raises(Unavailable, match="has no relay"):
        at_registered_relay(answer, "compute-17", "192.0.2.17:6080")


def test_without_a_registered_address_no_console_is_reached() -> None:
    answer = ConsoleEndpoint(host="192.0.2.17", port=6080, secret=SECRET)
    with pytest.raises(Unavailable, match="no console address is registered"):
        at_registered_relay(answer, "compute-17", "")
