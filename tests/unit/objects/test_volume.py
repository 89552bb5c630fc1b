"""How a volume service describes a connection."""

from typing import Any

import pytest

from micronova.objects.errors import NotSupported
from micronova.objects.volume import NBDConnection, connection_of

SOCKET = {"driver_volume_type": "nbd", "export_name": "e", "socket_path": "/s", "access_mode": "ro"}


def test_a_connection_is_flat_or_nested() -> None:
    wanted = NBDConnection(export_name="e", socket_path="/s", access_mode="ro")
    assert connection_of({**SOCKET, "attachment_id": "a"}) == wanted
    data = {key: value for key, value in SOCKET.items() if key != "driver_volume_type"}
    assert connection_of({"driver_volume_type": "nbd", "data": data}) == wanted


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({}, "connected by 'None'"),
        ({"driver_volume_type": "fibre_channel"}, "fibre_channel"),
        ({"driver_volume_type": "nbd"}, "not understood"),
        ({"driver_volume_type": "nbd", "export_name": "e", "host": "h"}, "without a socket"),
    ],
)
def test_other_connections_are_refused(info: dict[str, Any], text: str) -> None:
    with pytest.raises(NotSupported, match=text):
        connection_of(info)
