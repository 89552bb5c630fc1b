"""What the values of query parameters mean: resources, traits and aggregates, as lists and as groups."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from micronova.api.placement.schemas import NAMED, NUMBERED
from micronova.api.placement.uuids import is_uuid
from micronova.objects.errors import Invalid
from micronova.placement.model import RequestGroup, ResourceRequest

Query = Mapping[str, Sequence[str]]
BAD_VALUE: Final = "placement.query.bad_value"
MISSING_VALUE: Final = "placement.query.missing_value"
DUPLICATE_KEY: Final = "placement.query.duplicate_key"
MOST_GROUPS: Final = 64
_KINDS = ("resources", "required", "member_of", "in_tree")


def resources(text: str) -> dict[str, int]:
    """Return the amounts that `VCPU:2,MEMORY_MB:1024` names; raise Invalid."""
    form = "Badly formed resources parameter. Expected resources query string parameter in form:"
    form += " ?resources=VCPU:2,MEMORY_MB:1024. Got:"
    if not text.strip():
        raise Invalid(f"{form} empty string.")
    found: dict[str, int] = {}
    for part in text.split(","):
        name, separator, amount = part.partition(":")
        if not separator or ":" in amount:
            raise Invalid(f"{form} {part[:300]}.")
        if not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", amount):
            raise Invalid(f"Requested resource {name} expected positive integer amount. Got: {amount[:64]}.")
        if int(amount) < 1:
            raise Invalid(f"Requested resource {name} requires amount >= 1. Got: {int(amount)}.")
        found[name] = int(amount)
    return found


def no_such_class(names: Sequence[str]) -> Invalid:
    """Return the error of a request for resources of unknown classes."""
    return Invalid(f"Invalid resource class in resources parameter: No such resource class {', '.join(names)}.")


def traits(values: Sequence[str], minor: int) -> tuple[tuple[frozenset[str], ...], frozenset[str]]:
    """Return the required traits (one of each set), and the forbidden ones; raise Invalid."""
    required: list[frozenset[str]] = []
    forbidden: set[str] = set()
    for value in values if minor >= 39 else values[-1:]:
        if value.startswith("in:"):
            required.append(_any_of(value, minor))
            continue
        for name in (part.strip() for part in value.split(",")):
            bare = name.lstrip("!")
            if not bare:
                form = "HW_CPU_X86_VMX,!CUSTOM_MAGIC" if minor >= 22 else "HW_CPU_X86_VMX,CUSTOM_MAGIC"
                raise Invalid(
                    f"Invalid query string parameters: Expected 'required' parameter value of the form: {form}. "
                    f"Got an empty trait in: {value[:300]}"
                )
            if name == bare:
                required.append(frozenset({name}))
            elif minor < 22:
                raise Invalid(
                    "Invalid query string parameters: Expected 'required' parameter value of the form: "
                    f"HW_CPU_X86_VMX,CUSTOM_MAGIC. Got: {value[:300]}"
                )
            else:
                forbidden.add(bare)
    return tuple(required), frozenset(forbidden)


def _any_of(value: str, minor: int) -> frozenset[str]:
    form = "Invalid query string parameters: The format 'in:HW_CPU_X86_VMX,CUSTOM_MAGIC'"
    if minor < 39:
        raise Invalid(f"{form} only supported since microversion 1.39. Got: {value[:300]}")
    names = frozenset(part.strip() for part in value[3:].split(","))
    if not all(names):
        raise Invalid(
            "Invalid query string parameters: Expected 'required' parameter value of the form: "
            f"in:HW_CPU_X86_VMX,CUSTOM_MAGIC. Got an empty trait in: {value[:300]}"
        )
    if any(name.startswith("!") for name in names):
        raise Invalid(f"{form} does not support forbidden traits. Got: {value[:300]}")
    return names


def aggregates(
    values: Sequence[str], minor: int, suffix: str = ""
) -> tuple[tuple[frozenset[str], ...], frozenset[str]]:
    """Return the aggregates that a provider must be in (one of each set), and those that it must not be in."""
    if minor < 24 and len(values) > 1:
        raise Invalid(f"Multiple member_of{suffix} parameters are not supported")
    wanted: list[frozenset[str]] = []
    forbidden: set[str] = set()
    for value in values:
        negated = value.startswith("!")
        text = value.removeprefix("!")
        if "," in text and not text.startswith("in:"):
            raise Invalid(
                "Multiple values for 'member_of' must be prefixed with the 'in:' or '!in:' keyword using the valid "
                f"microversion. Got: {value[:300]}"
            )
        names = frozenset(text.removeprefix("in:").split(","))
        for each in names:
            if not is_uuid(each):
                raise Invalid(
                    "Invalid query string parameters: Expected 'member_of' parameter to contain valid UUID(s). "
                    f"Got: {each[:300]}"
                )
        if negated and minor < 32:
            raise Invalid(f"Forbidden member_of{suffix} parameters are not supported in the specified microversion")
        if negated:
            forbidden |= names
        else:
            wanted.append(names)
    return tuple(wanted), frozenset(forbidden)


def in_tree(value: str) -> str:
    """Return the uuid of a provider of the wanted tree; raise Invalid."""
    if not is_uuid(value.strip()):
        raise Invalid(
            f"Invalid query string parameters: Expected 'in_tree' parameter to be a format of uuid. Got: {value[:300]}"
        )
    return value.strip()


def request(query: Query, minor: int) -> ResourceRequest:
    """Return what GET /allocation_candidates asks for; raise Invalid."""
    parts = _parts(query, minor)
    same_subtrees = _same_subtrees(query, parts)
    groups = _groups(parts, minor, frozenset[str]().union(*same_subtrees))
    if "group_policy" not in query and sum(bool(group.resources) for group in groups if group.suffix) > 1:
        raise Invalid(
            'The "group_policy" parameter is required when specifying more than one "resources{N}" parameter.'
        )
    if len(groups) > MOST_GROUPS:
        raise Invalid(f"A request may have {MOST_GROUPS} groups.")
    root_required, root_forbidden = _root_traits(query, minor)
    limit = query.get("limit")
    return ResourceRequest(
        groups=tuple(groups),
        isolate=query.get("group_policy", [""])[0] == "isolate",
        root_required=root_required,
        root_forbidden=root_forbidden,
        same_subtrees=tuple(same_subtrees),
        nested=minor >= 29,
        limit=int(limit[0][:9]) if limit else None,
    )


def _parts(query: Query, minor: int) -> dict[str, dict[str, Sequence[str]]]:
    """Return the parameters of each group, by suffix and kind."""
    pattern = re.compile(f"({'|'.join(_KINDS)})({NAMED if minor >= 33 else NUMBERED})?")
    found: dict[str, dict[str, Sequence[str]]] = {}
    for key, values in query.items():
        if matched := pattern.fullmatch(key):
            found.setdefault(matched[2] or "", {})[matched[1]] = values
    return found


def _groups(
    parts: Mapping[str, Mapping[str, Sequence[str]]], minor: int, resourceless: frozenset[str]
) -> list[RequestGroup]:
    groups = []
    asks_for_resources = any("resources" in own for own in parts.values())
    orphans: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for suffix, own in sorted(parts.items()):
        required, forbidden = traits(own.get("required", ()), minor)
        wanted, unwanted = aggregates(own.get("member_of", ()), minor, suffix)
        tree = in_tree(own["in_tree"][-1]) if "in_tree" in own else None
        if "resources" not in own and (not suffix or minor < 36):
            for kind in own:
                orphans[kind].append(f"{kind}{suffix}")
            continue
        if "resources" not in own and suffix not in resourceless and asks_for_resources:
            raise Invalid(
                "Resourceless suffixed group request should be specified in `same_subtree` query param: bad group(s) - "
                f"{suffix}.",
                placement_code=BAD_VALUE,
            )
        both = forbidden & frozenset[str]().union(*(each for each in required if len(each) == 1))
        if both:
            raise Invalid(
                f"Conflicting required and forbidden traits found in the following traits keys: required{suffix}: "
                f"({', '.join(sorted(both))})"
            )
        groups.append(
            RequestGroup(
                suffix=suffix,
                resources=resources(own["resources"][-1]) if "resources" in own else {},
                required=required,
                forbidden=forbidden,
                member_of=wanted,
                not_member_of=unwanted,
                in_tree=tree,
            )
        )
    _refuse_orphans(orphans)
    if not groups:
        raise Invalid("At least one request group (`resources` or `resources{$S}`) is required.")
    if not any(group.resources for group in groups):
        raise Invalid("There must be at least one resources or resources[$S] parameter.", placement_code=MISSING_VALUE)
    return groups


def _refuse_orphans(orphans: Mapping[str, Sequence[str]]) -> None:
    for kind, noun in (("required", "traits"), ("member_of", "member_of"), ("in_tree", "in_tree")):
        if orphans[kind]:
            raise Invalid(
                f"Found the following orphaned {noun} keys: {', '.join(orphans[kind])}. "
                f"All {noun} parameters must be associated with resources. All request groups must specify resources."
            )


def _root_traits(query: Query, minor: int) -> tuple[frozenset[str], frozenset[str]]:
    values = query.get("root_required", ())
    if len(values) > 1:
        raise Invalid("Query parameter 'root_required' may be specified only once.", placement_code=DUPLICATE_KEY)
    if not values:
        return frozenset(), frozenset()
    required, forbidden = traits(values, min(minor, 38))
    wanted = frozenset[str]().union(*required)
    if both := wanted & forbidden:
        raise Invalid(
            f"Conflicting required and forbidden traits found in root_required: {', '.join(sorted(both))}",
            placement_code=BAD_VALUE,
        )
    return wanted, forbidden


def _same_subtrees(query: Query, parts: Mapping[str, Mapping[str, Sequence[str]]]) -> list[frozenset[str]]:
    found = []
    for value in query.get("same_subtree", ()):
        suffixes = [part.strip() for part in value.split(",")]
        if not all(suffixes):
            raise Invalid(
                "Empty string (unsuffixed group) can not be specified in `same_subtree`", placement_code=BAD_VALUE
            )
        if unknown := [each for each in suffixes if each not in parts]:
            raise Invalid(
                "Real suffixes should be specified in `same_subtree`: "
                f"{', '.join(unknown)} not found in {', '.join(sorted(parts))}.",
                placement_code=BAD_VALUE,
            )
        found.append(frozenset(suffixes))
    return found
