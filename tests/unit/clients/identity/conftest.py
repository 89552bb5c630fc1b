"""The client is tested against the embedded identity service."""

from tests.unit.embedded.identity.conftest import clock, cloud

__all__ = ["clock", "cloud"]
