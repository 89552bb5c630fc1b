"""Broker URLs."""

import pytest

from micronova.rpc.amqp.url import BrokerUrl, parse
from micronova.rpc.errors import BadBusUrl


def test_broker_urls() -> None:
    assert parse("amqp://user:p%40ss@one:1234,two,[::1]:5/v%2Fhost") == BrokerUrl(
        (("one", 1234), ("two", 5672), ("::1", 5)), "user", "p@ss", "v/host"
    )
    assert parse("amqp://broker") == BrokerUrl((("broker", 5672),), "guest", "guest", "/")
    assert parse("amqps://broker/?cafile=ca.pem") == BrokerUrl(
        (("broker", 5671),), "guest", "guest", "/", {"cafile": "ca.pem"}
    )
    assert str(parse("amqp://user:secret@broker/")) == "amqp://user@broker:5672/"
    cluster = parse("amqps://user:p@one:1234,[::1]/v%2Fhost?cafile=ca.pem")
    assert cluster.for_user("host:q") == "amqps://host:q@one:1234,[::1]:5671/v%2Fhost?cafile=ca.pem"
    assert parse(cluster.for_user("user:p")) == cluster
    for url in ("http://broker", "amqp:///vhost"):
        with pytest.raises(ValueError, match="broker URL"):
            parse(url)


@pytest.mark.parametrize(
    "option", ["cafile=ca.pem", "certfile=a&keyfile=b", "heartbeat=1&keyfile=b", "cafile=", "ssl=1"]
)
def test_options_of_tls_without_tls(option: str) -> None:
    """Who names an authority expects encryption."""
    with pytest.raises(BadBusUrl, match=r"is for TLS.*amqps://, not amqp://"):
        parse(f"amqp://user:secret@broker/?{option}")
    assert parse("amqp://broker/?heartbeat=1").tls is None
