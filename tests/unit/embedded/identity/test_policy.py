"""The rules of the identity service: what each role may do in each scope."""

import pytest

from micronova.objects.context import RequestContext
from micronova.policies.enforcer import Enforcer
from micronova.policies.identity import RULES

ENFORCER = Enforcer(RULES)

CALLERS = {
    "admin": {"roles": ("admin", "manager", "member", "reader"), "project_id": "p"},
    "system-admin": {"roles": ("admin", "manager", "member", "reader"), "system_scope": "all"},
    "system-reader": {"roles": ("reader",), "system_scope": "all"},
    "domain-manager": {"roles": ("manager", "member", "reader"), "domain_id": "d"},
    "domain-admin": {"roles": ("admin", "manager", "member", "reader"), "domain_id": "d"},
    "domain-reader": {"roles": ("reader",), "domain_id": "d"},
    "manager": {"roles": ("manager", "member", "reader"), "project_id": "p"},
    "member": {"roles": ("member", "reader"), "project_id": "p"},
    "reader": {"roles": ("reader",), "project_id": "p"},
    "service": {"roles": ("service",), "project_id": "s"},
    "unscoped": {"roles": ()},
}
ADMINS = {"admin", "system-admin"}
READERS = ADMINS | {"system-reader"}
MEMBERS = ADMINS | {"manager", "member", "domain-manager", "domain-admin"}
OWN_DOMAIN = {"project_id": "other", "user_id": "other", "domain_id": "d"}
OTHER_DOMAIN = {"project_id": "other", "user_id": "other", "domain_id": "e"}
OWN = {"project_id": "p", "user_id": "me", "domain_id": "e"}


def allowed(rule: str, target: dict[str, str] | None) -> set[str]:
    return {
        name
        for name, attributes in CALLERS.items()
        if ENFORCER.allows(rule, RequestContext(request_id="", user_id="me", **attributes), target)  # type: ignore[arg-type]
    }


DOMAIN_READERS = READERS | {"domain-reader", "domain-manager", "domain-admin"}
DOMAIN_MANAGERS = ADMINS | {"domain-manager", "domain-admin"}


@pytest.mark.parametrize(
    ("rule", "target", "expected"),
    [
        ("identity:get_project", OTHER_DOMAIN, READERS | {"service"}),
        ("identity:get_project", OWN_DOMAIN, DOMAIN_READERS | {"service"}),
        ("identity:get_project", OWN, READERS | {"manager", "member", "reader", "service"}),
        ("identity:list_projects", None, DOMAIN_READERS),
        ("identity:create_project", OWN_DOMAIN, DOMAIN_MANAGERS),
        ("identity:create_project", OTHER_DOMAIN, ADMINS),
        ("identity:delete_user", OWN_DOMAIN, DOMAIN_MANAGERS),
        ("identity:delete_user", OTHER_DOMAIN, ADMINS),
        ("identity:get_user", OWN, set(CALLERS)),
        ("identity:update_user", OWN, ADMINS),
        ("identity:create_domain", None, ADMINS),
        ("identity:create_role", None, ADMINS),
        ("identity:list_roles", None, READERS | {"domain-manager", "domain-admin"}),
        ("identity:create_grant", OWN_DOMAIN, DOMAIN_MANAGERS),
        ("identity:create_grant", {"domain_id": None}, ADMINS),
        ("identity:create_system_grant_for_user", None, ADMINS),
        ("identity:validate_token", OTHER_DOMAIN, READERS | {"service"}),
        ("identity:validate_token", OWN, set(CALLERS)),
        ("identity:revoke_token", OTHER_DOMAIN, ADMINS),
        ("identity:create_application_credential", OTHER_DOMAIN, set()),
        (
            "identity:create_application_credential",
            OWN,
            {"admin", "manager", "member", "reader", "service", "unscoped"},
        ),
        ("identity:list_application_credentials", OTHER_DOMAIN, READERS),
        ("identity:ec2_list_credentials", OWN, set(CALLERS)),
        ("identity:ec2_create_credential", OTHER_DOMAIN, ADMINS),
        ("identity:ec2_create_credential", OWN, MEMBERS),
        ("identity:ec2_delete_credential", OWN, MEMBERS),
        ("identity:list_services", None, READERS),
        ("identity:list_regions", None, set(CALLERS)),
        ("identity:list_revoke_events", None, ADMINS | {"service"}),
    ],
)
def test_rules(rule: str, target: dict[str, str] | None, expected: set[str]) -> None:
    assert allowed(rule, target) == expected


def test_a_member_sees_the_domain_of_its_project_and_no_other() -> None:
    member = RequestContext(request_id="", user_id="me", roles=("member",), project_id="p")
    assert ENFORCER.allows("identity:get_domain", member, {"domain_id": "e", "owner_is_caller": True})
    assert not ENFORCER.allows("identity:get_domain", member, {"domain_id": "e", "owner_is_caller": False})


def test_every_rule_has_a_description() -> None:
    assert all(rule.description for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)
