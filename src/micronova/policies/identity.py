"""The rules of the embedded identity service, under the names that Keystone gives them.

The defaults are Keystone's secure ones, with two differences, both narrower: an administrator with a token for a
domain acts in that domain only, and a manager of a domain is checked against one domain, the one that everything
named in the request is in (targets that span two domains match none). One is wider: the service role may read a
project, so that compute can tell whether a project exists.

What a target holds: `project_id`, `user_id`, `domain_id` (the domain that all of it is in) and, for get_domain,
`owner_is_caller` (the domain of the caller's project).
"""

from micronova.policies.enforcer import Rule

_ADMIN = "rule:admin_required"
_READER = "rule:admin_required or rule:system_reader"
_DOMAIN_READER = "rule:admin_required or rule:system_reader or rule:domain_reader"
_DOMAIN_MANAGER = "rule:admin_required or rule:domain_manager"
_ANYBODY = ""

BASE = [
    Rule("admin_required", "role:admin and domain_id:None", "An administrator of the cloud."),
    Rule("system_reader", "role:reader and system_scope:all", "Someone who may read everything."),
    Rule("domain_reader", "role:reader and domain_id:%(domain_id)s", "Someone who may read a domain."),
    Rule("domain_manager", "role:manager and domain_id:%(domain_id)s", "Someone who manages a domain."),
    Rule("service_role", "role:service", "One of the cloud's own services."),
    Rule("owner", "user_id:%(user_id)s", "The user that it is about."),
    Rule("project_member", "project_id:%(project_id)s", "Whoever has a token for the project that it is about."),
]

TOKENS = [
    Rule("identity:validate_token", f"{_READER} or rule:service_role or rule:owner", "Ask what a token says."),
    Rule("identity:check_token", f"{_READER} or rule:owner", "Ask whether a token is good."),
    Rule("identity:revoke_token", f"{_ADMIN} or rule:owner", "Void a token."),
    Rule("identity:list_revoke_events", f"{_ADMIN} or rule:service_role", "List what was revoked."),
    Rule("identity:get_auth_catalog", _ANYBODY, "See the catalog for one's own token."),
    Rule("identity:get_auth_projects", _ANYBODY, "See the projects that one can get a token for."),
    Rule("identity:get_auth_domains", _ANYBODY, "See the domains that one can get a token for."),
    Rule("identity:get_auth_system", _ANYBODY, "See whether one can get a token for the system."),
]

DOMAINS = [
    Rule(
        "identity:get_domain",
        f"{_READER} or domain_id:%(domain_id)s or True:%(owner_is_caller)s",
        "See a domain.",
    ),
    Rule("identity:list_domains", _DOMAIN_READER, "List domains."),
    Rule("identity:create_domain", _ADMIN, "Make a domain."),
    Rule("identity:update_domain", _ADMIN, "Change a domain."),
    Rule("identity:delete_domain", _ADMIN, "Delete a domain."),
]

PROJECTS = [
    Rule(
        "identity:get_project",
        f"{_DOMAIN_READER} or rule:project_member or rule:service_role",
        "See a project.",
    ),
    Rule("identity:list_projects", _DOMAIN_READER, "List projects."),
    Rule("identity:list_user_projects", f"{_DOMAIN_READER} or rule:owner", "List the projects of a user."),
    Rule("identity:create_project", _DOMAIN_MANAGER, "Make a project."),
    Rule("identity:update_project", _DOMAIN_MANAGER, "Change a project."),
    Rule("identity:delete_project", _DOMAIN_MANAGER, "Delete a project."),
    Rule(
        "identity:list_project_tags",
        f"{_DOMAIN_READER} or rule:project_member",
        "List the tags of a project.",
    ),
    Rule(
        "identity:get_project_tag",
        f"{_DOMAIN_READER} or rule:project_member",
        "Ask whether a project has a tag.",
    ),
    Rule("identity:update_project_tags", _DOMAIN_MANAGER, "Replace the tags of a project."),
    Rule("identity:create_project_tag", _DOMAIN_MANAGER, "Add a tag to a project."),
    Rule("identity:delete_project_tags", _DOMAIN_MANAGER, "Remove all tags from a project."),
    Rule("identity:delete_project_tag", _DOMAIN_MANAGER, "Remove a tag from a project."),
]

USERS = [
    Rule("identity:get_user", f"{_DOMAIN_READER} or rule:owner", "See a user."),
    Rule("identity:list_users", _DOMAIN_READER, "List users."),
    Rule("identity:create_user", _DOMAIN_MANAGER, "Make a user."),
    Rule("identity:update_user", _DOMAIN_MANAGER, "Change a user."),
    Rule("identity:delete_user", _DOMAIN_MANAGER, "Delete a user."),
]

GROUPS = [
    Rule("identity:get_group", _DOMAIN_READER, "See a group."),
    Rule("identity:list_groups", _DOMAIN_READER, "List groups."),
    Rule("identity:list_groups_for_user", f"{_DOMAIN_READER} or rule:owner", "List the groups of a user."),
    Rule("identity:create_group", _DOMAIN_MANAGER, "Make a group."),
    Rule("identity:update_group", _DOMAIN_MANAGER, "Change a group."),
    Rule("identity:delete_group", _DOMAIN_MANAGER, "Delete a group."),
    Rule("identity:list_users_in_group", _DOMAIN_READER, "List the members of a group."),
    Rule("identity:check_user_in_group", _DOMAIN_READER, "Ask whether a user is in a group."),
    Rule("identity:add_user_to_group", _DOMAIN_MANAGER, "Put a user into a group."),
    Rule("identity:remove_user_from_group", _DOMAIN_MANAGER, "Take a user out of a group."),
]

ROLES = [
    Rule("identity:get_role", f"{_READER} or (role:manager and not domain_id:None)", "See a role."),
    Rule("identity:list_roles", f"{_READER} or (role:manager and not domain_id:None)", "List roles."),
    Rule("identity:create_role", _ADMIN, "Make a role."),
    Rule("identity:update_role", _ADMIN, "Change a role."),
    Rule("identity:delete_role", _ADMIN, "Delete a role."),
    Rule("identity:list_domain_roles", _READER, "List the roles of a domain."),
    Rule("identity:create_domain_role", _ADMIN, "Make a role of a domain."),
    Rule("identity:get_implied_role", _READER, "See one implication of a role."),
    Rule("identity:list_implied_roles", _READER, "List what a role implies."),
    Rule("identity:check_implied_role", _READER, "Ask whether a role implies another."),
    Rule("identity:create_implied_role", _ADMIN, "Let a role imply another."),
    Rule("identity:delete_implied_role", _ADMIN, "Let a role no longer imply another."),
    Rule("identity:list_role_inference_rules", _READER, "List all implications."),
]

# Managers of a domain give and take only the roles that are theirs to give; the handler sees to that by naming no
# domain for any other role.
GRANTS = [
    Rule("identity:list_role_assignments", _DOMAIN_READER, "List who has which role where."),
    Rule(
        "identity:list_role_assignments_for_tree",
        _DOMAIN_READER,
        "List role assignments of a tree of projects.",
    ),
    Rule("identity:check_grant", _DOMAIN_READER, "Ask whether a role was granted."),
    Rule("identity:list_grants", _DOMAIN_READER, "List the roles granted to someone on something."),
    Rule("identity:create_grant", _DOMAIN_MANAGER, "Grant a role."),
    Rule("identity:revoke_grant", _DOMAIN_MANAGER, "Take a role away."),
    *(
        Rule(f"identity:{verb}_system_grant{plural}_for_{actor}", check, f"{what} on the system, of a {actor}.")
        for actor in ("user", "group")
        for verb, plural, check, what in (
            ("list", "s", _READER, "List roles"),
            ("check", "", _READER, "Ask for a role"),
            ("create", "", _ADMIN, "Grant a role"),
            ("revoke", "", _ADMIN, "Take away a role"),
        )
    ),
]

CREDENTIALS = [
    Rule("identity:get_application_credential", f"{_READER} or rule:owner", "See an application credential."),
    Rule("identity:list_application_credentials", f"{_READER} or rule:owner", "List application credentials."),
    Rule("identity:create_application_credential", "rule:owner", "Make an application credential."),
    Rule(
        "identity:delete_application_credential",
        f"{_ADMIN} or rule:owner",
        "Delete an application credential.",
    ),
]

CATALOG = [
    Rule("identity:get_region", _ANYBODY, "See a region."),
    Rule("identity:list_regions", _ANYBODY, "List regions."),
    *(Rule(f"identity:{verb}_region", _ADMIN, f"{verb.title()} a region.") for verb in ("create", "update", "delete")),
    *(
        Rule(f"identity:{verb}_{noun}", check, f"{verb.title()} what the catalog says of a {noun.rstrip('s')}.")
        for verb, noun, check in (
            ("get", "service", _READER),
            ("list", "services", _READER),
            ("create", "service", _ADMIN),
            ("update", "service", _ADMIN),
            ("delete", "service", _ADMIN),
            ("get", "endpoint", _READER),
            ("list", "endpoints", _READER),
            ("create", "endpoint", _ADMIN),
            ("update", "endpoint", _ADMIN),
            ("delete", "endpoint", _ADMIN),
        )
    ),
]

LIMITS = [
    Rule("identity:get_limit_model", _ANYBODY, "See how limits are enforced."),
    Rule("identity:list_limits", _ANYBODY, "List limits of projects."),
    Rule("identity:list_registered_limits", _ANYBODY, "List default limits."),
]

RULES = [
    *BASE, *TOKENS, *DOMAINS, *PROJECTS, *USERS, *GROUPS, *ROLES, *GRANTS, *CREDENTIALS, *CATALOG, *LIMITS,
]  # fmt: skip
