"""Ids of new things."""

import random
import uuid


def new_uuid(source: random.Random) -> str:
    """Make a random id."""
    return str(uuid.UUID(int=source.getrandbits(128), version=4))
