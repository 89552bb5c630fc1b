"""Who may do what: oslo.policy reads the rules, decisions are remembered.

A service brings its rules as data (`Rule` lists in this room); an operator's policy.yaml overrides them by name. A
decision depends only on the rule, the caller's roles and scope, and whether the target is the caller's own project,
user or domain: that is the key under which it is remembered, so that a check costs a dictionary look-up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oslo_config import cfg
from oslo_policy import policy as oslo

from micronova.http.context import RequestContext
from micronova.objects.errors import Forbidden, MicronovaError


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule with its default and what it is about."""

    name: str
    check: str
    description: str = ""


class _LazyRules(oslo.Rules):
    """Rules that are parsed when they are first asked for: a service has hundreds and uses few at its start."""

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


def _read(policy_file: Path) -> oslo.Rules:
    try:
        return oslo.Rules.load(policy_file.read_text())
    except OSError as error:
        raise PolicyFileError(f"Cannot read the policy file {policy_file}: {error.strerror}.") from None
    except (ValueError, UnicodeDecodeError, AttributeError) as error:  # the last: not a mapping
        reason = " ".join(str(error).split())[:200]
        raise PolicyFileError(f"The policy file {policy_file} does not give rules by name in YAML: {reason}.") from None


class Enforcer:
    """Decides for one service."""

    def __init__(self, rules: Iterable[Rule], policy_file: Path | None = None) -> None:
        self.rules = {rule.name: rule for rule in rules}
        checks = _LazyRules({rule.name: rule.check for rule in self.rules.values()})
        if policy_file is not None:
            checks.update(_read(policy_file))
        self._enforcer = oslo.Enforcer(cfg.ConfigOpts(), use_conf=False)
        self._enforcer.rules = checks  # set_rules would copy, and so parse all of them
        self._decided: dict[tuple[Any, ...], bool] = {}

    def allows(self, rule: str, context: RequestContext, target: Mapping[str, Any] | None = None) -> bool:
        """Say whether the caller may do this to the target (without one: within its own project)."""
        if rule not in self.rules:
            raise KeyError(f"There is no policy rule {rule!r}.")
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
            # What the token is for: rules may ask that as well (`domain_id:None`).
            bool(context.project_id),
            context.domain_id is not None,
        )
        known = self._decided.get(key)
        if known is None:
            known = self._decided[key] = self._decide(rule, context, key, target)
        return known

    def _decide(
        self, rule: str, context: RequestContext, key: tuple[Any, ...], target: Mapping[str, Any] | None
    ) -> bool:
        credentials = {
            "user_id": context.user_id,
            "project_id": context.project_id,
            "tenant_id": context.project_id,
            "domain_id": context.domain_id,
            "system_scope": context.system_scope,
            "roles": list(context.roles),
            "is_admin": "admin" in context.roles,
        }
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
        return bool(self._enforcer.enforce(rule, subject, credentials))

    def enforce(self, rule: str, context: RequestContext, target: Mapping[str, Any] | None = None) -> None:
        """Raise Forbidden unless the caller may."""
        if not self.allows(rule, context, target):
            raise Forbidden(f"Policy doesn't allow {rule} to be performed.")


# Further attributes of a target that rules may look at.
_EXTRA = frozenset(
    {
        "device_owner",
        "is_public",
        "network:router:external",
        "network:shared",
        "owner_is_caller",
        "router:external",
        "shared",
        "visibility",
    }
)
# Attributes of a target that name a project besides project_id: what counts is whether it is the caller's own.
# A target that is not given is the caller's own, and is shared with nobody.
_PROJECTS = ("owner", "member_id", "ext_parent:project_id", "network:project_id", "security_group:project_id")
_OWN = tuple(name != "member_id" for name in _PROJECTS)
