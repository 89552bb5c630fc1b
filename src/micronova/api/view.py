"""Views: the JSON form of a resource, declared field by field and compiled once per microversion.

A field declares its name, where its value comes from and at which microversions it exists. `View.at(minor)` returns a
function that turns a database row into the dictionary that is sent. The function is compiled from one dictionary
display, so a field that does not exist at this microversion costs nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from micronova.http.versions import Range

OMIT: Final = object()  # what the getter of an optional field returns to leave the field out
UNDECLARED: Final = object()  # the type of a field that says nothing about its values

Getter = Callable[[Any, Any], Any]  # (row, context) -> value; the context is what the view's caller passes
Shape = Callable[..., dict[str, Any]]  # (row, context=None) -> what is sent


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a view. A field whose form changes is declared once per form, with ranges that do not overlap."""

    name: str
    get: str | Getter  # a column (attribute of the row), or a function
    versions: Range = Range()
    when: str = ""  # only for callers of `at` that name this flag, e.g. "admin"
    optional: bool = False  # the getter may return OMIT
    # The type of the values, for the OpenAPI document; api/openapi.py says how it is written.
    type: Any = field(default=UNDECLARED, compare=False)


class View:
    """The fields of a resource."""

    def __init__(self, *fields: Field, keyed: bool = False) -> None:
        self.fields = fields
        self.keyed = keyed  # rows are mappings: row["column"] instead of row.column
        self._at: dict[tuple[int, frozenset[str]], Shape] = {}
        self._compiled: dict[tuple[Field, ...], Shape] = {}

    def at(self, minor: int, flags: frozenset[str] = frozenset()) -> Shape:
        """Return the function that turns a row into its form at this microversion for a caller with these flags."""
        shape = self._at.get((minor, flags))
        if shape is None:
            fields = tuple(
                each for each in self.fields if minor in each.versions and (not each.when or each.when in flags)
            )
            shape = self._compiled.get(fields)
            if shape is None:
                shape = self._compiled[fields] = _compile(fields, self.keyed)
            self._at[minor, flags] = shape
        return shape


def _compile(fields: tuple[Field, ...], keyed: bool) -> Shape:
    names = [each.name for each in fields]
    if len(set(names)) != len(names):
        raise ValueError(f"A field is declared twice for the same microversion: {names}.")
    scope: dict[str, Any] = {"OMIT": OMIT}
    parts: list[str] = []
    maybe: list[str] = []
    for number, each in enumerate(fields):
        if isinstance(each.get, str):
            if not each.get.isidentifier():
                raise ValueError(f"{each.get!r} is not the name of a column.")
            value = f"row[{each.get!r}]" if keyed else f"row.{each.get}"
        else:
            scope[f"get{number}"] = each.get
            value = f"get{number}(row, context)"
        if each.optional:
            maybe += [f"value = {value}", "if value is not OMIT:", f"    shown[{each.name!r}] = value"]
        else:
            parts.append(f"{each.name!r}: {value}")
    lines = ["shown = {" + ", ".join(parts) + "}", *maybe, "return shown"]
    exec("def shape(row, context=None):\n    " + "\n    ".join(lines), scope)  # noqa: S102 - made of our declarations only
    shape: Shape = scope["shape"]
    return shape
