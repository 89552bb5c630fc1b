"""The payloads of operations, which later versions read."""

import msgspec

from micronova.objects.operations import BuildPayload, MovePayload, UndoPayload
from micronova.objects.orders import MoveOrder
from tests.unit.scheduler.factory import a_flavor


def test_hosts_that_are_not_preferred_are_stored_with_the_name_that_earlier_versions_read() -> None:
    payload = msgspec.convert({"tried": ["h2"], "lacking": ["h1"]}, BuildPayload)
    payload.prefer_others("h2", "The host was stopped.")
    assert (payload.tried, payload.unpreferred) == ([], ["h1", "h2"])
    assert msgspec.msgpack.decode(payload.encode())["lacking"] == ["h1", "h2"]


def test_moves_are_stored_under_the_names_that_older_versions_know() -> None:
    move = MovePayload(migration="m", sent=True, undo_awaits_removal=True)
    undo = UndoPayload(migration="m", host="h1", sent=True, undo_awaits_removal=True)
    order = MoveOrder(source="h1", destination="h2", old_flavor=a_flavor(), sent=False)
    for stored in (msgspec.msgpack.decode(move.encode()), msgspec.msgpack.decode(undo.encode())):
        assert (stored["arrived"], stored["waits"]) == (True, True)
    assert msgspec.to_builtins(order)["arrived"] is False
    assert MovePayload.decode(move.encode()) == move and UndoPayload.decode(undo.encode()) == undo
