"""The bus through RabbitMQ does all that the local one does."""

import pytest

from tests.unit.rpc.bus_suite import *


@pytest.fixture
def bus_url(amqp_url: str) -> str:
    return amqp_url


@pytest.fixture
def sender() -> str:
    return "guest"
