"""The rules of the image service: what each role may do, by owner, visibility and membership."""

from pathlib import Path

import pytest

from micronova.objects.context import RequestContext
from micronova.policies.enforcer import Enforcer
from micronova.policies.image import RULES


def caller(project: str, *roles: str) -> RequestContext:
    return RequestContext(request_id="", user_id="u", project_id=project, roles=roles)


ADMIN, MEMBER, READER = ("admin", "member", "reader"), ("member", "reader"), ("reader",)
OWN = {"project_id": "p1", "owner": "p1", "visibility": "private", "member_id": None}
PUBLIC = {**OWN, "visibility": "public"}
INVITED = {**OWN, "visibility": "shared", "member_id": "p2"}

#                       rule              target    admin  member reader | of p2: member reader
TABLE = [
    ("get_image", OWN, (True, True, True, False, False)),
    ("get_image", PUBLIC, (True, True, True, True, True)),
    ("get_image", INVITED, (True, True, True, True, True)),
    ("download_image", OWN, (True, True, False, False, False)),
    ("download_image", PUBLIC, (True, True, False, True, False)),
    ("add_image", OWN, (True, True, False, False, False)),
    ("modify_image", PUBLIC, (True, True, False, False, False)),
    ("delete_image", INVITED, (True, True, False, False, False)),
    ("publicize_image", OWN, (True, False, False, False, False)),
    ("communitize_image", OWN, (True, True, False, False, False)),
    ("upload_image", OWN, (True, True, False, False, False)),
    ("deactivate", OWN, (True, True, False, False, False)),
    ("reactivate", OWN, (True, True, False, False, False)),
    ("add_member", INVITED, (True, True, False, False, False)),
    ("delete_member", INVITED, (True, True, False, False, False)),
    ("get_member", INVITED, (True, True, True, True, True)),
    ("get_members", OWN, (True, True, True, False, False)),
    ("modify_member", INVITED, (True, False, False, True, False)),
    ("context_is_admin", OWN, (True, False, False, False, False)),
    ("stores_info_detail", OWN, (True, False, False, False, False)),
]


@pytest.mark.parametrize(("rule", "target", "expected"), TABLE, ids=[f"{t[0]}-{n}" for n, t in enumerate(TABLE)])
def test_rules(rule: str, target: dict[str, str | None], expected: tuple[bool, ...]) -> None:
    enforcer = Enforcer(RULES)
    callers = [
        caller("p0", *ADMIN),
        *(caller(project, *roles) for project in ("p1", "p2") for roles in (MEMBER, READER)),
    ]
    for _ in range(2):  # the second time decisions come from the cache
        assert tuple(enforcer.allows(rule, each, target) for each in callers) == expected


def test_one_rule_says_who_is_an_administrator(tmp_path: Path) -> None:
    """An operator who overrides it changes all other rules, as in Glance."""
    file = tmp_path / "policy.yaml"
    file.write_text('context_is_admin: "role:image_admin"\n')
    enforcer = Enforcer(RULES, file)
    for rule, target, expected in TABLE:
        if expected[1:] == (False,) * 4 and rule != "stores_info_detail":
            assert not enforcer.allows(rule, caller("p0", "admin"), target), rule
        assert enforcer.allows(rule, caller("p0", "image_admin"), target), rule


def test_services_see_the_stores() -> None:
    assert Enforcer(RULES).allows("stores_info_detail", caller("p0", "service"), OWN)


def test_a_cached_decision_about_one_member_is_not_used_for_another() -> None:
    enforcer = Enforcer(RULES)
    assert enforcer.allows("modify_member", caller("p2", *MEMBER), INVITED)
    assert not enforcer.allows("modify_member", caller("p3", *MEMBER), INVITED)
    assert not enforcer.allows("modify_member", caller("", *MEMBER), {**INVITED, "member_id": ""})


def test_without_a_target_the_caller_acts_in_its_own_project() -> None:
    enforcer = Enforcer(RULES)
    assert enforcer.allows("add_image", caller("p1", *MEMBER))
    assert not enforcer.allows("modify_member", caller("p1", *MEMBER))  # not a member
