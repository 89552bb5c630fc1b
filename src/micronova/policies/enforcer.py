"""Policy: who may do what. oslo.policy evaluates the rules, and decisions are cached.

The rules of a service are data (the `Rule` lists in this package). An operator's policy.yaml overrides the check of a
rule by its name. It cannot override the scope types: a token with another scope is refused whatever the check says, as
OpenStack's services do with `enforce_scope`. A decision depends only on the rule, the caller's roles and scope, and
whether the target is the caller's own project, user or domain. These make the cache key, so a repeated check costs one
dictionary look-up. A policy file may also compare ids with literals or ask a server (`project_id:PROJECT`,
`http://...`). Then no decision is cached, and checks get the target as it is.
"""

import difflib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final

from oslo_config import cfg
from oslo_policy import _checks
from oslo_policy import policy as oslo

from micronova.objects.context import RequestContext
from micronova.objects.errors import Forbidden, MicronovaError

# A check that cannot be parsed is a mistake that `_read` names; the parser would log it with a traceback as well.
logging.getLogger("oslo_policy._parser").addFilter(lambda record: False)


def _load_and_make(point: EntryPoint, *arguments: str) -> Any:
    return point.load()(*arguments)


# The kinds of checks that packages add are loaded when a rule has one. oslo.policy would load all of them when it reads
# the first rule: `http` imports requests, with 119 modules.
_checks.extension_checks = {
    point.name: partial(_load_and_make, point) for point in entry_points(group="oslo.policy.rule_checks")
}

PROJECT = frozenset({"project"})
SYSTEM_PROJECT = frozenset({"system", "project"})
ANY_SCOPE = frozenset({"system", "domain", "project"})
CONTEXT_IS_ADMIN: Final = "context_is_admin"
"""The rule that says who is an administrator."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule with its default check, the scopes that a token may have, and a description."""

    name: str
    check: str
    description: str = ""
    scope_types: frozenset[str] = PROJECT


def scope_of(context: RequestContext) -> str:
    """Return the kind of scope of the caller's token. One without a scope counts as a project's, and has no roles."""
    if context.system_scope:
        return "system"
    return "project" if context.domain_id is None else "domain"


class _LazyRules(oslo.Rules):
    """Rules that are parsed at first use, because a service has hundreds and needs few of them to start."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, key: str) -> Any:
        if key not in self._texts:
            return super().__missing__(key)
        parsed = self[key] = oslo.RuleDefault(key, self._texts[key]).check
        return parsed

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._texts

    def __bool__(self) -> bool:
        return bool(self._texts)


class PolicyFileError(MicronovaError):
    """The operator's policy.yaml cannot be used."""

    code = "policy_file"


def _read(policy_file: Path, rules: Mapping[str, Rule]) -> oslo.Rules:
    """Return the rules of a policy file by name; raise PolicyFileError if one of them cannot have any effect."""
    try:
        texts = oslo.parse_file_contents(policy_file.read_text()) or {}
        parsed = oslo.Rules.from_dict(texts)
    except OSError as error:
        raise PolicyFileError(
            f"Cannot read the policy file {policy_file}: {error.strerror}. Name a file that this user can read."
        ) from None
    except (ValueError, UnicodeDecodeError, AttributeError, TypeError) as error:  # the last two: no mapping
        reason = " ".join(str(error).split())[:200]
        raise PolicyFileError(
            f"The policy file {policy_file} does not give rules by name in YAML: {reason}. Right is, for example, "
            '"os_compute_api:servers:create": "role:member".'
        ) from None
    if problems := _mistakes(texts, parsed, rules):
        raise PolicyFileError(f"The policy file {policy_file} has mistakes: {'; '.join(problems)}.")
    return parsed


def _mistakes(texts: Mapping[str, Any], parsed: oslo.Rules, rules: Mapping[str, Rule]) -> list[str]:
    """Return what is wrong with the rules of a policy file: names, syntax, and references to what does not exist."""
    found = []
    known = {*rules, *parsed}
    referred = {name for check in parsed.values() for name in _references(check)}
    referred |= {name for rule in rules.values() if rule.name not in parsed for name in _named_in(rule.check)}
    for name, check in parsed.items():
        if name not in rules and name not in referred:
            found.append(f"there is no rule {name}, nor does a rule refer to that name{_similar(name, rules)}")
        if any(str(each) == "!" for each in _leaves(check)) and "!" not in re.split(r"[\s()]+", str(texts[name])):
            found.append(
                f"the check of {name} cannot be understood: {str(texts[name])[:100]!r}; "
                "right is, for example, 'role:admin or project_id:%(project_id)s'"
            )
        found += [
            f"{name} refers to rule:{reference}, which does not exist{_similar(reference, known)}"
            for reference in sorted(_references(check) - known)
        ]
        found += [
            f"{name} compares {kind}, which no token has{_similar(kind, _KINDS)}; known are {', '.join(sorted(_KINDS))}"
            for kind in sorted(_unknown_kinds(check))
        ]
        if name in _reached(name, parsed, rules):
            found.append(f"{name} refers to itself by way of rule:")
    return found


def _named_in(text: str) -> set[str]:
    """Return the rules that the text of a default check refers to, without parsing it."""
    return set(re.findall(r"\brule:([^\s()]+)", text))


def _reached(name: str, parsed: oslo.Rules, rules: Mapping[str, Rule]) -> set[str]:
    """Return all rules that a rule depends on."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in parsed:
            following = _references(parsed[current])
        else:
            following = _named_in(rules[current].check) if current in rules else set()
        waiting += following - seen
        seen |= following
    return seen


def _leaves(check: Any) -> Iterator[Any]:
    """Yield the single checks that a check consists of."""
    if isinstance(check, oslo.NotCheck):
        yield from _leaves(check.rule)
    elif isinstance(check, oslo.AndCheck | oslo.OrCheck):
        for each in check.rules:
            yield from _leaves(each)
    else:
        yield check


def _references(check: Any) -> set[str]:
    return {each.match for each in _leaves(check) if getattr(each, "kind", "") == "rule"}


def _unknown_kinds(check: Any) -> set[str]:
    """Return the attributes of the caller that a check compares and that no caller has; literals are none."""
    kinds = {getattr(each, "kind", "") for each in _leaves(check)} - _KINDS - {"", "None", "True", "False"}
    return {kind for kind in kinds if not kind.startswith(("'", '"')) and not kind.lstrip("-").isdecimal()}


def _similar(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, 1, 0.8)
    return f" (did you mean {close[0]}?)" if close else ""


class Enforcer:
    """The policy of one service."""

    def __init__(self, rules: Iterable[Rule], policy_file: Path | None = None) -> None:
        self.rules = {rule.name: rule for rule in rules}
        checks = _LazyRules({rule.name: rule.check for rule in self.rules.values()})
        self.caches_decisions = True
        if policy_file is not None:
            overrides = _read(policy_file, self.rules)
            self.caches_decisions = all(_is_in_key(check) for check in overrides.values())
            checks.update(overrides)
        self._enforcer = oslo.Enforcer(cfg.ConfigOpts(), use_conf=False)
        self._enforcer.rules = checks  # set_rules would copy and thereby parse all of them
        self._decided: dict[tuple[Any, ...], bool] = {}

    def adopt(self, other: "Enforcer") -> None:
        """Decide as another enforcer of the same service does, from now on."""
        self._enforcer, self._decided = other._enforcer, {}
        self.caches_decisions = other.caches_decisions

    def is_admin(self, context: RequestContext) -> bool:
        """Return whether the caller is an administrator; False if the service has no rule for administrators."""
        return CONTEXT_IS_ADMIN in self.rules and self.allows(CONTEXT_IS_ADMIN, context)

    def allows(self, rule: str, context: RequestContext, target: Mapping[str, Any] | None = None) -> bool:
        """Return whether the rule allows the caller this on the target, by default on its own project."""
        if rule not in self.rules:
            raise KeyError(f"There is no policy rule {rule!r}.")
        if not self.caches_decisions:
            return self._takes_scope(rule, context) and self._evaluate(rule, context, self._whole(context, target))
        own = target is None
        project = context.project_id if own else target.get("project_id", target.get("tenant_id"))  # type: ignore[union-attr]
        user = context.user_id if own else target.get("user_id")  # type: ignore[union-attr]
        domain = context.domain_id if own else target.get("domain_id")  # type: ignore[union-attr]
        key = (
            rule,
            context.roles,
            bool(context.project_id) and project == context.project_id,
            user == context.user_id,
            domain is not None and domain == context.domain_id,
            context.system_scope,
            None if own else tuple(sorted((k, v) for k, v in target.items() if k in _EXTRA)),  # type: ignore[union-attr]
            None
            if own
            else tuple(
                bool(context.project_id) and target.get(name) == context.project_id  # type: ignore[union-attr]
                for name in _PROJECTS
            ),
            # The token's scope, which rules may check as well (`domain_id:None`).
            bool(context.project_id),
            context.domain_id is not None,
        )
        known = self._decided.get(key)
        if known is None:
            known = self._decided[key] = self._takes_scope(rule, context) and self._decide(rule, context, key, target)
        return known

    def _takes_scope(self, rule: str, context: RequestContext) -> bool:
        return scope_of(context) in self.rules[rule].scope_types

    def check_scope(self, rule: str, context: RequestContext) -> None:
        """Raise Forbidden if the rule takes no tokens with the scope of the caller's."""
        if not self._takes_scope(rule, context):
            wanted = " or ".join(sorted(self.rules[rule].scope_types))
            raise Forbidden(
                f"Policy doesn't allow {rule} to be performed with a token for a {scope_of(context)}: "
                f"it takes one for a {wanted}."
            )

    def _decide(
        self, rule: str, context: RequestContext, key: tuple[Any, ...], target: Mapping[str, Any] | None
    ) -> bool:
        subject = {
            **{k: v for k, v in (target or {}).items() if k in _EXTRA},
            "project_id": context.project_id if key[2] else "another project",
            "tenant_id": context.project_id if key[2] else "another project",
            "user_id": context.user_id if key[3] else "another user",
            "domain_id": context.domain_id if key[4] else "another domain",
            **{
                name: context.project_id if same else "another project"
                for name, same in zip(_PROJECTS, key[7] or _OWN, strict=True)
            },
        }
        return self._evaluate(rule, context, subject)

    def _whole(self, context: RequestContext, target: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the target as it is; without one, the caller's own project, user and domain.

        A target without a project or domain is not the caller's, even if the caller has none either.
        """
        if target is None:
            own = {name: context.project_id for name, is_own in zip(_PROJECTS, _OWN, strict=True) if is_own}
            target = {**own, "project_id": context.project_id, "user_id": context.user_id}
            target = {**target, "domain_id": context.domain_id}
        project = target.get("project_id", target.get("tenant_id"))
        project, domain = project or "no project", target.get("domain_id") or "no domain"
        return {**target, "project_id": project, "tenant_id": project, "domain_id": domain}

    def _evaluate(self, rule: str, context: RequestContext, subject: Mapping[str, Any]) -> bool:
        credentials = {
            "user_id": context.user_id,
            "project_id": context.project_id,
            "tenant_id": context.project_id,
            "domain_id": context.domain_id,
            "system_scope": context.system_scope,
            "roles": list(context.roles),
            "is_admin": rule != CONTEXT_IS_ADMIN and self.is_admin(context),
        }
        return bool(self._enforcer.enforce(rule, subject, credentials))

    def enforce(self, rule: str, context: RequestContext, target: Mapping[str, Any] | None = None) -> None:
        """Raise Forbidden unless the caller may."""
        if not self.allows(rule, context, target):
            raise Forbidden(f"Policy doesn't allow {rule} to be performed.")


# What a check may begin with: an attribute of the caller, or a kind of check.
_KINDS = frozenset(
    {
        "domain_id",
        "field",
        "http",
        "https",
        "is_admin",
        "project_id",
        "role",
        "rule",
        "service_roles",
        "system_scope",
        "tenant_id",
        "user_id",
    }
)
# Further attributes of a target that rules may use.
_EXTRA = frozenset(
    {
        "device_owner",
        "is_public",
        "network:router:external",
        "network:shared",
        "owner_is_caller",
        "router:external",
        "shared",
        "target_tenant",
        "visibility",
    }
)
# Attributes of a target, besides project_id, that name a project; only whether it is the caller's own matters.
# Without a target, one of the caller's project is assumed that is shared with no other project.
_PROJECTS = ("owner", "member_id", "ext_parent:project_id", "network:project_id", "security_group:project_id")
_OWN = tuple(name != "member_id" for name in _PROJECTS)


def _is_in_key(check: Any) -> bool:
    """Return whether the cache key has all that the result of a check depends on."""
    if isinstance(check, oslo.NotCheck):
        return _is_in_key(check.rule)
    if isinstance(check, oslo.AndCheck | oslo.OrCheck):
        return all(_is_in_key(each) for each in check.rules)
    if str(check) in ("@", "!"):
        return True
    attribute = check.match[2:-2] if check.match.startswith("%(") and check.match.endswith(")s") else None
    match check.kind:
        case "rule":
            return True
        case "field":  # RESOURCE:ATTRIBUTE=VALUE
            return check.match.partition(":")[2].partition("=")[0] in _EXTRA
        case "role" | "is_admin" | "system_scope" | "service_roles":  # no caller has service roles
            return attribute is None
        case "project_id" | "tenant_id":
            return check.match == "None" or attribute in ("project_id", "tenant_id", *_PROJECTS)
        case "user_id" | "domain_id":
            return attribute == check.kind or (check.kind, check.match) == ("domain_id", "None")
    return attribute in _EXTRA
