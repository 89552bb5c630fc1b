"""Requirements in extra specs: a key, in a namespace or without any, and an operator and a value in one string."""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from micronova.objects.errors import Invalid
from micronova.scheduler.host_columns import Bools, Column

_NUMBER: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.ge,  # "=" means at least, as for vcpus
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
}
_STRING: dict[str, Callable[[str, str], bool]] = {
    "s==": operator.eq,
    "s!=": operator.ne,
    "s>=": operator.ge,
    "s>": operator.gt,
    "s<=": operator.le,
    "s<": operator.lt,
}
_SYNTAX = re.compile(
    r"\s*(?P<operator><all-in>|<or>|<in>|s==|s!=|s>=|s<=|s>|s<|==|!=|>=|<=|=)\s*(?P<rest>.*?)\s*", re.DOTALL
)


class Requirement:
    """A parsed requirement."""

    def __init__(self, text: str) -> None:
        parsed = _SYNTAX.fullmatch(text)
        self.operator = parsed["operator"] if parsed else "s=="
        self.operand = parsed["rest"] if parsed else text.strip()

    def problem(self) -> str:
        """Return why no value can fulfil the requirement, "" if one can."""
        if not self.operand:
            return f"nothing follows {self.operator}"
        if self.operator in _NUMBER:
            try:
                float(self.operand)
            except ValueError:
                return f"{self.operator} compares with a number, and {self.operand} is none"
        return ""

    def match(self, value: object) -> bool:
        """Return whether a value fulfils the requirement."""
        if self.operator in _NUMBER:
            try:
                return bool(_NUMBER[self.operator](float(str(value)), float(self.operand)))
            except ValueError:
                return False
        if self.operator == "<all-in>":
            among = value if isinstance(value, list | tuple) else str(value)
            return all(word in among for word in self.operand.split())
        if self.operator == "<in>":
            return self.operand in (" ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))
        if self.operator == "<or>":
            return str(value) in [choice.strip() for choice in self.operand.split("<or>")]
        return _STRING[self.operator](str(value), self.operand)

    def match_column(self, values: Column, number: type[int] | type[float] = int) -> Bools:
        """Return for each number of a column whether it fulfils the requirement; `number` is how texts show it."""
        if self.operator in _NUMBER:
            try:
                wanted = float(self.operand)
            except ValueError:
                return np.zeros(len(values), np.bool_)
            return np.asarray(_NUMBER[self.operator](values, wanted), np.bool_)
        return np.fromiter((self.match(number(value)) for value in values), np.bool_, len(values))


def key_in(namespace: str, name: str) -> str | None:
    """Return the key that an extra spec has in a namespace, or without any; None if it is in another namespace."""
    own, colon, key = name.partition(":")
    if not colon:
        return name
    return key if own == namespace else None


def check_requirements(extra_specs: Mapping[str, str], namespace: str) -> None:
    """Raise Invalid if an extra spec of this namespace has a requirement that nothing can fulfil."""
    for name, text in extra_specs.items():
        if name.startswith(f"{namespace}:") and (problem := Requirement(text).problem()):
            raise Invalid(
                f"The extra spec {name} is wrong: {problem}. Right is a value, or an operator and a value: "
                f"{', '.join((*_NUMBER, *_STRING, '<in>', '<all-in>', '<or>'))}."
            )
