"""Scope types: which kinds of tokens a rule takes, whatever its check says."""

from pathlib import Path

import pytest

from micronova.objects.context import RequestContext
from micronova.objects.errors import Forbidden
from micronova.policies import compute, identity, image, network, volume
from micronova.policies.enforcer import ANY_SCOPE, PROJECT, SYSTEM_PROJECT, Enforcer

ROLES = ("admin", "manager", "member", "reader")
PROJECT_TOKEN = RequestContext(request_id="", user_id="u", project_id="p", roles=ROLES)
DOMAIN_TOKEN = RequestContext(request_id="", user_id="u", domain_id="d", roles=ROLES)
SYSTEM_TOKEN = RequestContext(request_id="", user_id="u", system_scope="all", roles=ROLES)

# Keystone's rules that do not take every scope: `system` and `project` for those about the whole cloud.
ABOUT_THE_CLOUD = {
    "identity:list_revoke_events",
    *(f"identity:{verb}_{noun}" for verb in ("create", "update", "delete") for noun in ("domain", "role", "region")),
    "identity:list_domain_roles",
    "identity:create_domain_role",
    *(f"identity:{verb}_implied_role" for verb in ("get", "check", "create", "delete")),
    "identity:list_implied_roles",
    "identity:list_role_inference_rules",
    *(
        f"identity:{verb}_for_{actor}"
        for verb in ("list_system_grants", "check_system_grant", "create_system_grant", "revoke_system_grant")
        for actor in ("user", "group")
    ),
    "identity:get_application_credential",
    "identity:list_application_credentials",
    "identity:delete_application_credential",
    *(f"identity:{verb}_{noun}" for verb in ("get", "create", "update", "delete") for noun in ("service", "endpoint")),
    "identity:list_services",
    "identity:list_endpoints",
    "identity:get_access_rule",
    "identity:list_access_rules",
    "identity:delete_access_rule",
    "identity:create_limits",
    "identity:create_registered_limits",
    *(f"identity:{verb}_{noun}" for verb in ("update", "delete") for noun in ("limit", "registered_limit")),
}

IMAGE_DOCUMENTS = {"default"}  # schemas and the like, which Glance shows without a rule


@pytest.mark.parametrize("service", [compute, image, network, volume], ids=lambda module: module.__name__)
def test_all_services_but_identity_are_about_projects(service: object) -> None:
    rules = [rule for rule in service.RULES if rule.name not in IMAGE_DOCUMENTS]  # type: ignore[attr-defined]
    assert {rule.scope_types for rule in rules} == {PROJECT}
    enforcer = Enforcer(rules)
    for rule in rules:
        for context in (DOMAIN_TOKEN, SYSTEM_TOKEN):
            assert not enforcer.allows(rule.name, context)
            with pytest.raises(Forbidden):
                enforcer.check_scope(rule.name, context)
        enforcer.check_scope(rule.name, PROJECT_TOKEN)


def test_identity_has_keystones_scope_types() -> None:
    for rule in identity.RULES:
        if rule.name in ("identity:create_application_credential", "identity:create_trust"):
            assert rule.scope_types == PROJECT
        else:
            assert rule.scope_types == (SYSTEM_PROJECT if rule.name in ABOUT_THE_CLOUD else ANY_SCOPE), rule.name
    assert {rule.name for rule in identity.RULES} >= ABOUT_THE_CLOUD


def test_a_policy_file_changes_the_check_and_not_the_scope(tmp_path: Path) -> None:
    policy_file = tmp_path / "policy.yaml"
    policy_file.write_text("os_compute_api:servers:index: '@'\n")
    enforcer = Enforcer(compute.RULES, policy_file)
    rule = "os_compute_api:servers:index"
    assert enforcer.allows(rule, RequestContext(request_id="", user_id="u", project_id="p"))
    assert not enforcer.allows(rule, DOMAIN_TOKEN) and not enforcer.allows(rule, SYSTEM_TOKEN)


def test_the_refusal_says_which_scope_would_be_right() -> None:
    with pytest.raises(Forbidden, match="with a token for a domain: it takes one for a project"):
        Enforcer(compute.RULES).check_scope("os_compute_api:servers:index", DOMAIN_TOKEN)
