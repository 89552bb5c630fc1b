"""Rules for simulated faults and delays: which calls of the driver fail or take long, for which guests, how often."""

import re
from random import Random
from typing import Any, Literal, NamedTuple

import msgspec

from micronova.objects.errors import Invalid
from micronova.objects.wrong_values import wrong_value

DriverCall = Literal[
    "spawn",
    "boot",
    "destroy",
    "power_on",
    "power_off",
    "shutdown",
    "reboot",
    "pause",
    "unpause",
    "suspend",
    "resume",
    "snapshot",
    "upload",
    "quiesce",
    "unquiesce",
    "rescue",
    "unrescue",
    "set_admin_password",
    "trigger_crash_dump",
    "rebuild",
    "attach_interface",
    "detach_interface",
    "attach_volume",
    "detach_volume",
    "swap_volume",
    "extend_volume",
    "resize",
    "confirm_resize",
    "revert_resize",
    "export_disks",
    "import_guest",
    "check_live_migration",
    "live_migrate",
    "rollback_live_migration",
    "receive_live_guest",
    "console",
    "diagnostics",
    "cache_image",
    "*",
]
"""`boot` and `shutdown` are what the guest does when it is started and asked to stop, `upload` is the upload of a
snapshot; the others are the methods of the driver. `*` is all but `boot`."""

Kind = Literal["fail", "abort", "no_resources", "unavailable", "not_supported", "hang", "crash", "delay"]
"""fail: the hypervisor fails; another host may succeed. abort: the guest cannot be built anywhere. no_resources:
this host lacks resources after all. unavailable: the hypervisor cannot be reached now. not_supported: it cannot do
that. hang: the call does not end until it is cancelled. crash: it succeeds, and the guest crashes right after. delay:
it succeeds, later."""


class FaultRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule. Patterns are regular expressions that may match anywhere; without a pattern everything matches."""

    operation: DriverCall = "*"
    kind: Kind = "fail"
    name: str | None = None  # of the instance
    metadata: dict[str, str] = {}  # key -> pattern of its value
    host: str | None = None
    probability: float = 1.0
    delay: float | tuple[float, float] = 0.0
    """Seconds before the fault, whatever its kind; of a pair, a random number in between."""
    count: int | None = None  # how many times it applies; for ever if absent
    message: str = ""


class _Rule:
    """A rule with compiled patterns and the number of times that it applied."""

    __slots__ = ("_host", "_metadata", "_name", "hits", "rule")

    def __init__(self, rule: FaultRule) -> None:
        delays = rule.delay if isinstance(rule.delay, tuple) else (rule.delay,)
        if not 0.0 <= rule.probability <= 1.0 or min(delays) < 0.0 or (rule.count is not None and rule.count < 0):
            raise Invalid(
                "A fault rule needs a probability between 0 and 1, a delay and a count that are not negative."
            )
        self.rule = rule
        self.hits = 0
        self._name = _pattern(rule.name)
        self._host = _pattern(rule.host)
        self._metadata = {key: _pattern(pattern) for key, pattern in rule.metadata.items()}

    def matches(self, call: str, host: str, name: str, metadata: dict[str, str]) -> bool:
        rule = self.rule
        return (
            (rule.operation == call or (rule.operation == "*" and call != "boot"))
            and (rule.count is None or self.hits < rule.count)
            and (self._name is None or self._name.search(name) is not None)
            and (self._host is None or self._host.search(host) is not None)
            and all(
                key in metadata and (pattern is None or pattern.search(metadata[key]) is not None)
                for key, pattern in self._metadata.items()
            )
        )


class DrawnFault(NamedTuple):
    """The delay and the fault of one call."""

    delay: float = 0.0
    kind: str = ""  # "" if nothing goes wrong
    message: str = ""


NOTHING = DrawnFault()


class FaultRules:
    """The rules of all simulated hosts of a process. The hosts share the counts, as in "the first two builds fail"."""

    def __init__(self, random: Random, rules: tuple[FaultRule, ...] = ()) -> None:
        self._random = random
        self._rules = [_Rule(rule) for rule in rules]

    def draw(self, call: str, host: str, name: str, metadata: dict[str, str]) -> DrawnFault:
        """Return the delay of a call, the sum of all that apply, and its fault, the first that applies; count both."""
        if not self._rules:
            return NOTHING
        delay = 0.0
        fault: FaultRule | None = None
        for entry in self._rules:
            rule = entry.rule
            if fault is not None and rule.kind != "delay":
                continue
            if entry.matches(call, host, name, metadata) and self._happens(rule):
                entry.hits += 1
                delay += self._random.uniform(*rule.delay) if isinstance(rule.delay, tuple) else rule.delay
                if rule.kind != "delay":
                    fault = rule
        return DrawnFault(delay, fault.kind, fault.message) if fault is not None else DrawnFault(delay)

    def listed(self) -> list[dict[str, Any]]:
        """Return the rules as plain data, each with its hits."""
        return [{**msgspec.to_builtins(rule.rule), "hits": rule.hits} for rule in self._rules]

    def replace(self, rules: list[dict[str, Any]]) -> None:
        """Replace the rules; `hits`, as listed, is ignored."""
        plain = [{key: value for key, value in rule.items() if key != "hits"} for rule in rules]
        try:
            wanted = msgspec.convert(plain, list[FaultRule])
        except msgspec.ValidationError as error:
            wrong = wrong_value(error, list[FaultRule])
            raise Invalid(f"This is not a list of fault rules: {wrong.named('the list')}.") from error
        self._rules = [_Rule(rule) for rule in wanted]

    def _happens(self, rule: FaultRule) -> bool:
        return rule.probability >= 1.0 or self._random.random() < rule.probability


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise Invalid(f"{text!r} in a fault rule is not a regular expression: {error}.") from error
