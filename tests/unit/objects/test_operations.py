"""The payloads of operations, which later versions read."""

import msgspec

from micronova.objects.operations import BuildPayload


def test_hosts_that_are_not_preferred_are_stored_with_the_name_that_earlier_versions_read() -> None:
    payload = msgspec.convert({"tried": ["h2"], "lacking": ["h1"]}, BuildPayload)
    payload.prefer_others("h2", "The host was stopped.")
    assert (payload.tried, payload.unpreferred) == ([], ["h1", "h2"])
    assert msgspec.msgpack.decode(payload.encode())["lacking"] == ["h1", "h2"]
