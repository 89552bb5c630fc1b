"""A decision for one caller or target is never reused for another that a rule could tell apart."""

from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import yaml

from micronova.objects.context import RequestContext
from micronova.policies import compute, identity, image, network, volume
from micronova.policies.enforcer import Enforcer, Rule

ALICE = RequestContext(request_id="", user_id="alice", project_id="blue", roles=("member",))
BOB = msgspec.structs.replace(ALICE, user_id="bob", project_id="red")


def _enforcer(tmp_path: Path, check: str) -> Enforcer:
    file = tmp_path / "policy.yaml"
    file.write_text(f'thing: "{check}"\n')
    return Enforcer([Rule("thing", "!")], file)


@pytest.mark.parametrize("check", ["project_id:blue", "user_id:alice", "role:admin or 'alice':%(user_id)s"])
def test_a_literal_in_a_policy_file_names_one_caller(tmp_path: Path, check: str) -> None:
    enforcer = _enforcer(tmp_path, check)
    assert enforcer.allows("thing", ALICE)
    assert not enforcer.allows("thing", BOB)
    assert enforcer.allows("thing", ALICE)


@pytest.mark.parametrize("check", ["'blue':%(project_id)s", "not 'red':%(project_id)s", "'disk':%(name)s"])
def test_a_literal_in_a_policy_file_names_one_target(tmp_path: Path, check: str) -> None:
    enforcer = _enforcer(tmp_path, check)
    for caller in (ALICE, BOB):
        assert enforcer.allows("thing", caller, {"project_id": "blue", "name": "disk"})
        assert not enforcer.allows("thing", caller, {"project_id": "red", "name": "net"})


@pytest.mark.parametrize("service", [compute, identity, image, network, volume])
def test_the_cache_tells_apart_all_that_our_own_rules_tell_apart(tmp_path: Path, service: ModuleType) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(yaml.safe_dump({rule.name: rule.check for rule in service.RULES}))
    assert Enforcer(service.RULES, file).caches_decisions


MANAGER = msgspec.structs.replace(ALICE, roles=("manager", "member", "reader"))
UNSCOPED = RequestContext(request_id="", user_id="alice")


@pytest.mark.parametrize(
    ("rule", "caller", "target"),
    [
        ("identity:create_grant", MANAGER, {"domain_id": None}),
        ("identity:create_user", MANAGER, {"domain_id": None}),
        ("identity:list_users", MANAGER, None),
        ("identity:get_project", UNSCOPED, {"project_id": None, "domain_id": None}),
        ("identity:get_project", UNSCOPED, None),
    ],
)
def test_a_literal_elsewhere_in_a_policy_file_opens_nothing(
    tmp_path: Path, rule: str, caller: RequestContext, target: dict[str, str | None] | None
) -> None:
    """A caller without a domain or project is not the owner of what has none."""
    file = tmp_path / "policy.yaml"
    file.write_text('"identity:list_regions": "project_id:blue"\n')
    enforcer = Enforcer(identity.RULES, file)
    assert not enforcer.caches_decisions
    assert not enforcer.allows(rule, caller, target)
    assert not Enforcer(identity.RULES).allows(rule, caller, target)
