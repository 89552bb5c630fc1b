"""What is wrong with data that does not have its type, in words: where the mistake is and what would be right.

msgspec finds the mistake and names its place. What would be right follows from the type at that place. A pattern is
nothing to show: the `title` of its `Meta` says in words what the strings are that match.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

Exists = Callable[[type, str], bool]
"""Says whether a struct has a field for the one who sent the data."""

_UNKNOWN = re.compile("Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile("Object missing required field `(.*)`", re.DOTALL)
_CHOICES = re.compile(r"(?:\^|\\A)\(([\w|.-]+)\)(?:\$|\\Z)")
_PART = re.compile(r"\.?([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_LONGEST_NAME = 64
_MOST_NAMES = 24  # of known fields in one message


class WrongValue(NamedTuple):
    """A mistake in data."""

    place: str  # such as `server.networks[0].uuid`; empty for the whole
    problem: str  # a clause without a full stop
    unknown: str = ""  # the name of the field, if the mistake is a field that does not exist

    def named(self, whole: str) -> str:
        """Return the clause with the name of the place, which is `whole` if all of the data is meant."""
        place = self.place or whole
        subject, _, rest = self.problem.partition(" ")
        return f"{place} {rest}" if subject == "it" else f"{place}: {self.problem}"


def wrong_value(error: msgspec.ValidationError, kind: Any, exists: Exists = lambda cls, name: True) -> WrongValue:
    """Return what is wrong with data that should be a `kind`, by the error that decoding it raised."""
    text, _, path = str(error).rpartition(" - at `")
    if not text:
        text, path = path, ""
    path = path.rstrip("`")
    in_key = path.startswith("key` in `")
    path = path.removeprefix("key` in `").removeprefix("$").lstrip(".")
    of_value = path.endswith("[...]")
    place = (path.removesuffix("[...]") if of_value else path).replace("[...]", ".*")
    nodes = list(_at(_node(kind), path))
    if found := _UNKNOWN.fullmatch(text):
        return WrongValue(place, _unknown(found[1], nodes, exists), found[1])
    if found := _MISSING.fullmatch(text):
        return WrongValue(place, f"'{found[1]}' is a required property")
    if error.__cause__ is not None:  # a type's own check wrote the text
        return WrongValue(place, text.rstrip("."))
    if in_key:
        nodes = [each.key_type for each in nodes if isinstance(each, inspect.DictType)]
    subject = "each key" if in_key else "each value" if of_value else "it"
    right = _alternatives(nodes) or "another value"
    return WrongValue(place, f"{subject} must be {right}")


def what_is_right(kind: Any) -> str:
    """Return in words which values a type has."""
    return _alternatives(_flat(_node(kind)))


def similar(name: str, known: Iterable[str]) -> str:
    """Return the question whether a name that is close was meant; an empty text if there is none."""
    close = difflib.get_close_matches(name, list(known), 1, 0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def _unknown(name: str, nodes: Iterable[inspect.Type], exists: Exists) -> str:
    known = [
        field.encode_name
        for node in nodes
        if isinstance(node, inspect.StructType)
        for field in node.fields
        if exists(node.cls, field.encode_name)
    ]
    right = ""
    if close := difflib.get_close_matches(name, known, 1, 0.75):
        right = f"; did you mean '{close[0]}'?"
    elif 0 < len(known) <= _MOST_NAMES:
        right = f"; known are {', '.join(sorted(known))}"
    return f"Additional properties are not allowed ('{name[:_LONGEST_NAME]}' was unexpected{right})"


@cache
def _node(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _flat(node: inspect.Type) -> Iterator[inspect.Type]:
    """Return the alternatives of a type, without unions."""
    if isinstance(node, inspect.UnionType):
        for each in node.types:
            yield from _flat(each)
    elif isinstance(node, inspect.Metadata) and isinstance(node.type, inspect.UnionType):
        yield from _flat(node.type)
    else:
        yield node


def _bare(node: inspect.Type) -> inspect.Type:
    return _bare(node.type) if isinstance(node, inspect.Metadata) else node


def _at(node: inspect.Type, path: str) -> Iterator[inspect.Type]:
    """Return the alternatives of the type at a path, as msgspec writes paths."""
    if not path:
        yield from _flat(node)
        return
    part = _PART.match(path)
    if part is None:
        return
    rest = path[part.end() :]
    for each in map(_bare, _flat(node)):
        if part[1] is not None and isinstance(each, inspect.StructType):
            for field in each.fields:
                if field.encode_name == part[1]:
                    yield from _at(field.type, rest)
        elif part[2] == "..." and isinstance(each, inspect.DictType):
            yield from _at(each.value_type, rest)
        elif part[2] is not None and isinstance(each, inspect.TupleType):
            yield from _at(each.item_types[min(int(part[2]), len(each.item_types) - 1)], rest)
        elif part[2] is not None and isinstance(each, _COLLECTIONS):
            yield from _at(each.item_type, rest)


_COLLECTIONS = (inspect.ListType, inspect.VarTupleType, inspect.SetType, inspect.FrozenSetType)

_PLAIN: Mapping[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.NoneType: "null",
    inspect.AnyType: "a value",
    inspect.DateTimeType: "a time such as 2026-01-31T12:00:00Z",
    inspect.UUIDType: "a UUID",
    inspect.BytesType: "a string in base64",
}


def _alternatives(nodes: Iterable[inspect.Type]) -> str:
    """Return the words for any of some types, each once: a number that may also be a string is a number."""
    words = list(dict.fromkeys(_words(each) for each in nodes))
    if _PLAIN[inspect.BoolType] in words:  # words for true and false may be strings, too
        words = [each for each in words if '"true"' not in each.lower()]
    kept = [
        each
        for each in words
        if not any(other != each and other.startswith((f"{each} ", f"{each},")) for other in words)
    ]
    kept.sort(key=_PLAIN[inspect.NoneType].__eq__)  # null comes last
    return " or ".join(kept)


def _words(node: inspect.Type) -> str:
    title = ""
    while isinstance(node, inspect.Metadata):
        title = title or (node.extra_json_schema or {}).get("title", "")
        title = title or _example((node.extra_json_schema or {}).get("examples"), _bare(node))
        node = node.type
    if isinstance(node, inspect.StrType):
        return _string(node, title)
    if isinstance(node, inspect.IntType | inspect.FloatType):
        return title or _number(node)
    if isinstance(node, inspect.LiteralType):
        return title or _one_of(node.values)
    if isinstance(node, inspect.EnumType):
        return title or _one_of([each.value for each in node.cls])
    if isinstance(node, (*_COLLECTIONS, inspect.TupleType)):
        size = _range(node.min_length, node.max_length) if not isinstance(node, inspect.TupleType) else ""
        if isinstance(node, inspect.TupleType):
            size = str(len(node.item_types))
        return f"a list of {_counted(size, 'item', 'items')}" if size else "a list"
    if isinstance(node, inspect.DictType):
        size = _range(node.min_length, node.max_length)
        return f"an object of {_counted(size, 'entry', 'entries')}" if size else "an object"
    return title or _PLAIN.get(type(node), "an object")


def _example(examples: Any, node: inspect.Type) -> str:
    """Return the words for a string with a pattern by an example of it."""
    shows = examples and isinstance(node, inspect.StrType) and node.pattern and not _CHOICES.fullmatch(node.pattern)
    return f"a string such as {_json(examples[0])}" if shows else ""


def _string(node: inspect.StrType, title: str) -> str:
    if not title and node.pattern and (choices := _CHOICES.fullmatch(node.pattern)):
        return _one_of(choices[1].split("|"))
    length = _range(node.min_length, node.max_length)
    if title:
        return f"{title}, {_counted(length, 'character', 'characters')}" if length else title
    if (node.min_length, node.max_length) == (1, None):
        return "a string that is not empty"
    return f"a string of {_counted(length, 'character', 'characters')}" if length else "a string"


def _number(node: inspect.IntType | inspect.FloatType) -> str:
    what = "a whole number" if isinstance(node, inspect.IntType) else "a number"
    if node.ge is not None and node.le is not None:
        return f"{what} from {node.ge:.15g} to {node.le:.15g}"
    limits = (("at least", node.ge), ("above", node.gt), ("at most", node.le), ("below", node.lt))
    bounds = " and ".join(f"{word} {limit:.15g}" for word, limit in limits if limit is not None)
    return f"{what} of {bounds}" if bounds.startswith("at") else f"{what} {bounds}".rstrip()


def _range(least: int | None, most: int | None) -> str:
    if least and most is not None:
        return f"{least} to {most}" if least < most else str(most)
    if most is not None:
        return f"at most {most}"
    return f"at least {least}" if least else ""


def _counted(size: str, one: str, many: str) -> str:
    return f"{size} {one if size == '1' or size.endswith(' 1') else many}"


def _one_of(values: Iterable[Any]) -> str:
    return f"one of {', '.join(map(_json, values))}"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
