"""How much a compute host may say. Conductors store and log what hosts report, and a stolen host can report anything.

The limits are part of the types of messages, so that decoding a message applies them. A name that is too long or has
control characters is an invalid message, and so is a number that no column of the database or of the scheduler holds. A
text for people is cut: a host repeats a report until it is accepted, and an older agent may send more than this one
would.
"""

import sys
import unicodedata
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
MOST_MDEV_PARENTS: Final = 1024  # devices with mediated devices of all nodes in a host's part of a heartbeat
MOST_MDEV_TYPES: Final = 16  # types of mediated devices of a host, and resource classes for them

DEEPEST_DESCRIPTION: Final = 32  # levels of lists and tables in data of no declared type
LARGEST_COUNT: Final = 2**31 - 1  # of an integer column
LARGEST_ADOPTED_EPOCH: Final = 2**30  # of a guest that a server is given: the server's next ones fit into the column
LARGEST_NUMBER: Final = 2**63 - 1  # of a column of times, and of the scheduler's columns
LATEST: Final = 1e11  # seconds since 1970
LONGEST_TIME: Final = 1e9  # seconds

Name = Annotated[
    str,
    msgspec.Meta(
        max_length=LONGEST_NAME,
        # No control characters, and none that change the direction or the lines of what is printed.
        title="a string without control characters",
        pattern="^[^\\x00-\\x1f\\x7f-\\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]*\\Z",
    ),
]
"""A name, an id or an address that a host reports."""
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]
"""How many or how much there is of something, an epoch, or a number that names something."""
Whole = Annotated[int, msgspec.Meta(ge=-LARGEST_COUNT, le=LARGEST_COUNT)]
"""A number that can be below 0."""
LargeNumber = Annotated[int, msgspec.Meta(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
"""A counter, a time in microseconds or what was measured."""
Moment = Annotated[float, msgspec.Meta(ge=0, le=LATEST)]
"""A time in seconds since 1970."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST_TIME)]
"""How long something has taken."""
Ratio = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
"""How often something may be given out; it is finite."""


def cut_text(text: str, longest: int, *, lines: bool = False) -> str:
    """Return the beginning of a text as one line, or with its lines, in which what is not printable is replaced.

    Databases do not store all such characters, and the terminal of an operator obeys some of them.
    """
    if len(text) > longest:
        text = f"{text[: longest - 1]}…"
    if text.isprintable():
        return text
    if not lines:
        text = text.replace("\n", " ")
    return "".join(map(_printable, text))


def _printable(character: str) -> str:
    known = character.isprintable() or character in "\n\t" or unicodedata.category(character) == "Zs"
    return character if known else "\N{REPLACEMENT CHARACTER}"


def cut_texts(message: msgspec.Struct, /, *, with_lines: str = "", **longest: int) -> None:
    """Cut texts of a message, by the names of its fields; for its `__post_init__`, which decoding runs too.

    `with_lines` is the field that may have several lines.
    """
    for field, most in longest.items():
        text = getattr(message, field)
        if text is not None and (len(text) > most or not text.isprintable()):
            msgspec.structs.force_setattr(message, field, cut_text(text, most, lines=field == with_lines))


def check_size(what: str, data: Any, most: int) -> None:
    """Raise ValueError, which makes a message invalid, if data has more bytes."""
    if data and len(msgspec.msgpack.encode(data)) > most:
        raise ValueError(f"{what} has more than {most} bytes")


def check_data(what: str, data: Any, levels: int = DEEPEST_DESCRIPTION) -> None:
    """Raise ValueError if data of no declared type is too deep to be stored, or has a number that is too large."""
    if isinstance(data, dict | list | tuple):
        if not levels:
            raise ValueError(f"{what} has more than {DEEPEST_DESCRIPTION} levels")
        for each in data.values() if isinstance(data, dict) else data:
            check_data(what, each, levels - 1)
    elif isinstance(data, int | float) and not -LARGEST_NUMBER <= data <= LARGEST_NUMBER:
        raise ValueError(f"{what} has a number that is not between -{LARGEST_NUMBER} and {LARGEST_NUMBER}")
