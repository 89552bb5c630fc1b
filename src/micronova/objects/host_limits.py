"""How much a compute host may say. Conductors store and log what hosts report, and a stolen host can report anything.

The limits are part of the types of messages, so that decoding a message applies them. A name that is too long is an
invalid message. A text for people is cut: a host repeats a report until it is accepted, and an older agent may send
more than this one would.
"""

from typing import Annotated, Any, Final

import msgspec

LONGEST_NAME: Final = 255
LONGEST_MESSAGE: Final = 1000
LONGEST_DETAILS: Final = 4000
LONGEST_DESCRIPTION: Final = 65_536  # bytes of a description of a node that has no type of its own
LONGEST_DESCRIPTIONS: Final = 1 << 23  # characters of the descriptions and topologies of all nodes of a host together
LARGEST_MIGRATE_DATA: Final = 65_536  # bytes that the source of a move has for the destination
MOST_HOSTS: Final = 50_000  # of one process
MOST_GUESTS: Final = 50_000  # of one host
MOST_NODES: Final = 1000  # of one host
MOST_REPORTED: Final = 5000  # entries of each list of one host's part of a heartbeat; the next one has the others
MOST_QUESTIONS: Final = 1000  # ports or guests that one question is about
MOST_PROPERTIES: Final = 1000  # of a node
MOST_TRAITS: Final = 1000  # of a node
MOST_DEVICES: Final = 10_000  # of a guest, of each kind

Name = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
"""A name, an id or an address that a host reports."""


def cut_text(text: str, longest: int) -> str:
    """Return the beginning of a text, without characters that a database does not store."""
    if len(text) > longest:
        text = f"{text[: longest - 1]}…"
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def cut_texts(message: msgspec.Struct, /, **longest: int) -> None:
    """Cut texts of a message, by the names of its fields; for its `__post_init__`, which decoding runs too."""
    for field, most in longest.items():
        text = getattr(message, field)
        if text is not None and (len(text) > most or "\0" in text):
            msgspec.structs.force_setattr(message, field, cut_text(text, most))


def check_size(what: str, data: Any, most: int) -> None:
    """Raise ValueError, which makes a message invalid, if data of no declared type has more bytes."""
    if data and len(msgspec.msgpack.encode(data)) > most:
        raise ValueError(f"{what} has more than {most} bytes")
