"""Ids of new objects."""

import random
import uuid


def new_uuid(source: random.Random) -> str:
    """Return a new random UUID."""
    return str(uuid.UUID(int=source.getrandbits(128), version=4))
