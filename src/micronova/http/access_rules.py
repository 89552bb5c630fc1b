"""Access rules: a token of an application credential that has some is good for no other requests.

A rule names a type of service, a method and a path. In a path `*` and `{name}` stand for one segment or a part of it,
and `**` for anything, as in keystonemiddleware. Other characters stand for themselves.

Paths are those below the service, such as /v2.1/servers. A rule whose path begins with the service's mount, such as
/compute/v2.1/servers, means the same.
"""

import re
from functools import lru_cache

AccessRules = tuple[tuple[str, str, str], ...]  # type of service, method, path

# A user chooses the pattern: it must not be able to make a match slow. So no regular expression is made of it, and a
# match takes a time that grows with the length of the path only. A token can have many rules: what is read for all of
# them together is limited, too. A request for which that is not enough is refused.
LONGEST = 512  # characters of a path
MOST_READ = 32_768  # characters of patterns and, once for each rule that is compared, of the path
_TOKEN = re.compile(r"\{[^{}]*\}|\*\*+|\*|.", re.DOTALL)


class PathPattern:
    """The pattern of paths in a rule."""

    def __init__(self, text: str) -> None:
        # Bit i of these numbers is about token i of the pattern.
        self._literals: dict[str, int] = {}
        self._segment = 0  # tokens that stand for one or more characters without a slash
        self._anything = 0  # tokens that stand for any number of characters
        tokens = _TOKEN.findall(text)
        for position, token in enumerate(tokens):
            if token.startswith("**"):
                self._anything |= 1 << position
            elif token == "*" or len(token) > 1:
                self._segment |= 1 << position
            else:
                self._literals[token] = self._literals.get(token, 0) | 1 << position
        self._end = 1 << len(tokens)

    def matches(self, path: str) -> bool:
        """Return whether the pattern stands for the whole path."""
        return self.read(path)[0]

    def read(self, path: str) -> tuple[bool, int]:
        """Return whether the pattern stands for the whole path, and how many of its characters were read to know."""
        if len(path) > LONGEST:
            return False, 0
        # Bit i of the state: the first i tokens can stand for what was read so far.
        state = self._skip(1)
        for count, character in enumerate(path, 1):
            following = (state & self._literals.get(character, 0)) << 1 | state & self._anything
            if character != "/":
                following |= (state & self._segment) << 1 | state & self._segment << 1
            state = self._skip(following)
            if not state:
                return False, count
        return bool(state & self._end), len(path)

    def _skip(self, state: int) -> int:
        return state | (state & self._anything) << 1


_pattern = lru_cache(maxsize=1024)(PathPattern)


def allow(rules: AccessRules, service: str, mount: str, method: str, path: str) -> bool:
    """Return whether one of the rules allows a request to a service; `path` is that below its mount."""
    left = MOST_READ
    for of_service, of_method, pattern in rules:
        if of_service == service and of_method == method:
            if mount and pattern.startswith(f"{mount}/"):
                pattern = pattern.removeprefix(mount)
            left -= len(pattern) + len(path)
            if left < 0:
                return False
            matched, read = _pattern(pattern).read(path)
            if matched:
                return True
            left += len(path) - read
    return False
