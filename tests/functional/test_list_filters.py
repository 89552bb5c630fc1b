"""Every filter of every list selects or is refused: none is accepted and then ignored.

The names come from the types that routes declare, from the attributes that a list shows, and from what Keystone
filters by. So a new filter or attribute is tried as well.
"""

from typing import Any

import msgspec
import pytest

from micronova.http.service import Route, Service
from tests.functional import good_requests as good
from tests.functional.full_cloud import FullCloud, full_cloud

__all__ = ["full_cloud"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOTHING = "zz-nothing-has-this"
NOT_FILTERS = {
    # They select a page, an order, a form or another set of things.
    "all_projects", "all_tenants", "detailed", "end", "fields", "instance_usage_audit_log", "limit", "marker",
    "member_status", "page_reverse", "reserved", "sort", "sort_dir", "sort_key", "start", "usage_only",
    "with_servers",
    # Nothing has it, so everything is selected.
    "not-tags", "not-tags-any",
    # It adds servers that are soft-deleted, or leaves them out.
    "soft_deleted",
    # Every value but one selects the others.
    "scope.OS-INHERIT:inherited_to", "scope.system",
}  # fmt: skip
WITHOUT_FILTERS = {
    # OpenStack's services have none here.
    "", "/", "/extensions", "/v2.0", "/v2.0/extensions", "/v2/images/{image_id}/members", "/v2/info/stores",
    "/v2/info/stores/detail", "/v2.0/trunks/{id}/get_subports", "/versions", "/versions/",
}  # fmt: skip
KEYSTONE = {
    "/v3/application_credentials": ("name",),
    "/v3/domains": ("name", "enabled"),
    "/v3/endpoints": ("interface", "service_id", "region_id"),
    "/v3/groups": ("domain_id", "name", "name__contains", "name__zork"),
    "/v3/groups/{group_id}/users": ("domain_id", "enabled", "name", "password_expires_at"),
    "/v3/projects": ("domain_id", "enabled", "name", "parent_id", "is_domain", "tags", "tags-any"),
    "/v3/regions": ("parent_region_id",),
    "/v3/role_assignments": (
        "group.id",
        "role.id",
        "scope.domain.id",
        "scope.project.id",
        "scope.OS-INHERIT:inherited_to",
        "scope.system",
        "user.id",
    ),
    "/v3/roles": ("name", "domain_id"),
    "/v3/services": ("type", "name"),
    "/v3/users": (
        "domain_id",
        "enabled",
        "idp_id",
        "name",
        "password_expires_at",
        "protocol_id",
        "unique_id",
    ),
    "/v3/users/{user_id}/groups": ("name",),
    "/v3/users/{user_id}/projects": ("domain_id", "enabled", "name"),
}


def _listed(body: Any) -> list[Any] | None:
    """Return the things of a list; None if the body is no list."""
    if not isinstance(body, dict):
        return None
    found = [value for name, value in body.items() if isinstance(value, list) and not name.endswith("_links")]
    return found[0] if len(found) == 1 else None


def _others(body: bytes) -> list[Any]:
    """Return the things of a list that do not have the value. A project's default security group is made by asking."""
    return [one for one in _listed(msgspec.json.decode(body)) or () if NOTHING not in str(one)]


def _names(service: Service, route: Route, shown: list[Any]) -> set[str]:
    if service.name == "identity":
        return set(KEYSTONE.get(route.path, ()))
    declared = good.query_names(route)
    documents = [each for each in shown if isinstance(each, dict)]
    if service.name in ("image", "network"):
        # Attributes that are structures are no filters, but for those that lists of OpenStack's own have.
        return {name for each in documents for name, value in each.items() if not isinstance(value, (dict, list))}
    return declared


@pytest.mark.thorough
async def test_a_filter_that_nothing_matches_selects_nothing(full_cloud: FullCloud) -> None:
    owner = await full_cloud.person("member")
    things = await good.make_things(full_cloud, owner)
    admin = full_cloud.admin
    tried, ignored, seen = 0, [], set()
    for service, route in full_cloud.routes():
        if route.method != "GET" or route.path.endswith("}") or good.is_removed(route):
            continue
        if route.path in WITHOUT_FILTERS:
            continue
        path, minor = good.path(service, route, things), good.newest(route)
        everything = "all_tenants=1&" if service.name == "compute" and "/servers" in path else ""
        answer = await admin.request("GET", f"{path}?{everything}", minor=minor)
        shown = _listed(msgspec.json.decode(answer.body)) if answer.status == 200 and answer.body[:1] == b"{" else None
        if not shown:
            continue
        for name in sorted(_names(service, route, shown) - NOT_FILTERS):
            tried += 1
            seen.add(route.path)
            answer = await admin.request("GET", f"{path}?{everything}{name}={NOTHING}", minor=minor)
            if answer.status not in (400, 404) and _others(answer.body):
                ignored.append(f"GET {path}?{name}={NOTHING}: {answer.status} {answer.body[:80]!r}")
    assert not ignored, f"{len(ignored)} of {tried}:\n" + "\n".join(ignored)
    assert tried > 200, tried
    assert {"/v3/users", "/v3/projects", "/v2/images", "/v2.0/ports", "/servers/detail"} <= seen, sorted(seen)


async def test_who_may_not_see_hosts_cannot_find_them_by_a_filter(full_cloud: FullCloud) -> None:
    manager = await full_cloud.person("manager")
    path = f"/compute/v2.1/os-migrations?project_id={manager.project_id}"
    assert (await manager.do("GET", path))["migrations"] == []
    for filter_ in ("host", "source_compute"):
        assert (await manager.request("GET", f"{path}&{filter_}=host-1")).status == 403
        await full_cloud.admin.do("GET", f"{path}&{filter_}=host-1")
