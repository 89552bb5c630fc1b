"""The frames that we pack and unpack ourselves are those of pamqp, which follows the specification."""

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import body, commands, header

from micronova.rpc.amqp import frames

names = st.text(st.characters(min_codepoint=33, max_codepoint=0x24F), max_size=80)
tags = st.integers(1, 2**63 - 1)
channels = st.integers(1, 2047)


@given(channels, st.from_regex(r"[a-zA-Z0-9-_.:]{0,80}", fullmatch=True), names, st.booleans())
def test_publish(channel: int, exchange: str, key: str, mandatory: bool) -> None:
    frame = commands.Basic.Publish(exchange=exchange, routing_key=key, mandatory=mandatory)
    assert frames.publish_frame(channel, exchange, key, mandatory=mandatory) == pamqp.frame.marshal(frame, channel)


@given(channels, st.integers(0, 2**40), st.booleans(), names, names)
def test_header(channel: int, size: int, persistent: bool, reply_to: str, message_id: str) -> None:
    properties = commands.Basic.Properties(
        delivery_mode=2 if persistent else 1,
        reply_to=reply_to or None,
        message_id=message_id or None,
        user_id="guest",
    )
    ours = frames.header_frame(
        channel,
        size,
        persistent=persistent,
        reply_to=frames.shortstr(reply_to) if reply_to else b"",
        message_id=frames.shortstr(message_id) if message_id else b"",
        user_id=frames.shortstr("guest"),
    )
    assert ours == pamqp.frame.marshal(header.ContentHeader(body_size=size, properties=properties), channel)
    assert frames.read_properties(ours, 7) == frames.Properties(size, reply_to, message_id, "guest")


@given(names, names, names)
def test_properties_of_others_are_skipped(reply_to: str, message_id: str, user_id: str) -> None:
    properties = commands.Basic.Properties(
        content_type="application/msgpack",
        content_encoding="utf-8",
        headers={"x-death": [{"count": 1, "queue": "q"}], "x-delivery-count": 3},
        delivery_mode=2,
        priority=3,
        correlation_id="c",
        reply_to=reply_to or None,
        expiration="1000",
        message_id=message_id or None,
        message_type="t",
        user_id=user_id or None,
        app_id="a",
    )
    data = pamqp.frame.marshal(header.ContentHeader(body_size=5, properties=properties), 1)
    assert frames.read_properties(data, 7) == frames.Properties(5, reply_to, message_id, user_id)


@given(channels, tags, st.booleans())
def test_acknowledgements(channel: int, tag: int, requeue: bool) -> None:
    assert frames.ack_frame(channel, tag) == pamqp.frame.marshal(commands.Basic.Ack(tag), channel)
    reject = pamqp.frame.marshal(commands.Basic.Reject(tag, requeue), channel)
    assert frames.reject_frame(channel, tag, requeue=requeue) == reject


@given(names.filter(bool), tags)
def test_deliveries(consumer_tag: str, tag: int) -> None:
    data = pamqp.frame.marshal(commands.Basic.Deliver(consumer_tag, tag, False, "", "key"), 1)
    assert frames.read_deliver(data, 11) == (consumer_tag, tag)


@given(st.binary(max_size=100))
def test_bodies_are_cut_to_the_brokers_limit(content: bytes) -> None:
    data = frames.body_frames(3, content, frame_max=16)
    received = b""
    while data:
        size, channel, frame = pamqp.frame.unmarshal(data)
        assert channel == 3
        assert size <= 16
        assert isinstance(frame, body.ContentBody)
        received += frame.value or b""
        data = data[size:]
    assert received == content


def test_names_that_are_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        frames.shortstr("x" * 256)
