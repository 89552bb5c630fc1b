"""The rules of the embedded identity service, under the names that Keystone gives them and with its scope types.

The defaults are Keystone's secure ones with three differences. Two are stricter: an administrator with a
domain-scoped token acts in that domain only, and a domain manager may act only if everything that the request names
is in one domain. One is wider: the service role may read a project, so that compute can check that it exists.

A policy target has `project_id`, `user_id`, `domain_id` (the domain that everything is in, or None) and, for
get_domain, `owner_is_caller` (whether it is the domain of the caller's project).
"""

from functools import partial

from micronova.policies.enforcer import ANY_SCOPE, SYSTEM_PROJECT, Rule

_ADMIN = "rule:admin_required"
_READER = "rule:admin_required or rule:system_reader"
_DOMAIN_READER = "rule:admin_required or rule:system_reader or rule:domain_reader"
_DOMAIN_MANAGER = "rule:admin_required or rule:domain_manager"
_ANYBODY = ""

_Rule = partial(Rule, scope_types=ANY_SCOPE)
_CloudRule = partial(Rule, scope_types=SYSTEM_PROJECT)  # about the whole cloud: not with a token for a domain

BASE = [
    _Rule("admin_required", "role:admin and domain_id:None", "An administrator of the cloud."),
    _Rule("system_reader", "role:reader and system_scope:all", "A reader with a token for the system."),
    _Rule("domain_reader", "role:reader and domain_id:%(domain_id)s", "A reader with a token for the domain."),
    _Rule("domain_manager", "role:manager and domain_id:%(domain_id)s", "A manager with a token for the domain."),
    _Rule("service_role", "role:service", "A service of the cloud."),
    _Rule("owner", "user_id:%(user_id)s", "The user that the request is about."),
    _Rule(
        "project_member", "project_id:%(project_id)s", "A user with a token for the project that the request is about."
    ),
]

TOKENS = [
    _Rule("identity:validate_token", f"{_READER} or rule:service_role or rule:owner", "Show a token."),
    _Rule("identity:check_token", f"{_READER} or rule:owner", "Check a token."),
    _Rule("identity:revoke_token", f"{_ADMIN} or rule:owner", "Revoke a token."),
    _CloudRule("identity:list_revoke_events", f"{_ADMIN} or rule:service_role", "List revocations."),
    _Rule("identity:get_auth_catalog", _ANYBODY, "Show the catalog of one's own token."),
    _Rule("identity:get_auth_projects", _ANYBODY, "List the projects that one can get a token for."),
    _Rule("identity:get_auth_domains", _ANYBODY, "List the domains that one can get a token for."),
    _Rule("identity:get_auth_system", _ANYBODY, "Show whether one can get a token for the system."),
]

DOMAINS = [
    _Rule(
        "identity:get_domain",
        f"{_READER} or domain_id:%(domain_id)s or True:%(owner_is_caller)s",
        "Show a domain.",
    ),
    _Rule("identity:list_domains", _DOMAIN_READER, "List domains."),
    _CloudRule("identity:create_domain", _ADMIN, "Create a domain."),
    _CloudRule("identity:update_domain", _ADMIN, "Change a domain."),
    _CloudRule("identity:delete_domain", _ADMIN, "Delete a domain."),
]

PROJECTS = [
    _Rule(
        "identity:get_project",
        f"{_DOMAIN_READER} or rule:project_member or rule:service_role",
        "Show a project.",
    ),
    _Rule("identity:list_projects", _DOMAIN_READER, "List projects."),
    _Rule("identity:list_user_projects", f"{_DOMAIN_READER} or rule:owner", "List the projects of a user."),
    _Rule("identity:create_project", _DOMAIN_MANAGER, "Create a project."),
    _Rule("identity:update_project", _DOMAIN_MANAGER, "Change a project."),
    _Rule("identity:delete_project", _DOMAIN_MANAGER, "Delete a project."),
    _Rule(
        "identity:list_project_tags",
        f"{_DOMAIN_READER} or rule:project_member",
        "List the tags of a project.",
    ),
    _Rule(
        "identity:get_project_tag",
        f"{_DOMAIN_READER} or rule:project_member",
        "Check whether a project has a tag.",
    ),
    _Rule("identity:update_project_tags", _DOMAIN_MANAGER, "Replace the tags of a project."),
    _Rule("identity:create_project_tag", _DOMAIN_MANAGER, "Add a tag to a project."),
    _Rule("identity:delete_project_tags", _DOMAIN_MANAGER, "Remove all tags from a project."),
    _Rule("identity:delete_project_tag", _DOMAIN_MANAGER, "Remove a tag from a project."),
]

USERS = [
    _Rule("identity:get_user", f"{_DOMAIN_READER} or rule:owner", "Show a user."),
    _Rule("identity:list_users", _DOMAIN_READER, "List users."),
    _Rule("identity:create_user", _DOMAIN_MANAGER, "Create a user."),
    _Rule("identity:update_user", _DOMAIN_MANAGER, "Change a user."),
    _Rule("identity:delete_user", _DOMAIN_MANAGER, "Delete a user."),
]

GROUPS = [
    _Rule("identity:get_group", _DOMAIN_READER, "Show a group."),
    _Rule("identity:list_groups", _DOMAIN_READER, "List groups."),
    _Rule("identity:list_groups_for_user", f"{_DOMAIN_READER} or rule:owner", "List the groups of a user."),
    _Rule("identity:create_group", _DOMAIN_MANAGER, "Create a group."),
    _Rule("identity:update_group", _DOMAIN_MANAGER, "Change a group."),
    _Rule("identity:delete_group", _DOMAIN_MANAGER, "Delete a group."),
    _Rule("identity:list_users_in_group", _DOMAIN_READER, "List the members of a group."),
    _Rule("identity:check_user_in_group", _DOMAIN_READER, "Check whether a user is in a group."),
    _Rule("identity:add_user_to_group", _DOMAIN_MANAGER, "Add a user to a group."),
    _Rule("identity:remove_user_from_group", _DOMAIN_MANAGER, "Remove a user from a group."),
]

ROLES = [
    _Rule("identity:get_role", f"{_READER} or (role:manager and not domain_id:None)", "Show a role."),
    _Rule("identity:list_roles", f"{_READER} or (role:manager and not domain_id:None)", "List roles."),
    _CloudRule("identity:create_role", _ADMIN, "Create a role."),
    _CloudRule("identity:update_role", _ADMIN, "Change a role."),
    _CloudRule("identity:delete_role", _ADMIN, "Delete a role."),
    _CloudRule("identity:list_domain_roles", _READER, "List the roles of a domain."),
    _CloudRule("identity:create_domain_role", _ADMIN, "Create a role of a domain."),
    _CloudRule("identity:get_implied_role", _READER, "Show an implication of a role."),
    _CloudRule("identity:list_implied_roles", _READER, "List the roles that a role implies."),
    _CloudRule("identity:check_implied_role", _READER, "Check whether a role implies another."),
    _CloudRule("identity:create_implied_role", _ADMIN, "Create a role imply another."),
    _CloudRule("identity:delete_implied_role", _ADMIN, "Remove an implication of a role."),
    _CloudRule("identity:list_role_inference_rules", _READER, "List all implications."),
]

# Domain managers grant and revoke only some roles. For any other role the handler puts no domain into the target.
GRANTS = [
    _Rule("identity:list_role_assignments", _DOMAIN_READER, "List role assignments."),
    _Rule(
        "identity:list_role_assignments_for_tree",
        _DOMAIN_READER,
        "List role assignments of a tree of projects.",
    ),
    _Rule("identity:check_grant", _DOMAIN_READER, "Check whether a role was granted."),
    _Rule(
        "identity:list_grants",
        _DOMAIN_READER,
        "List the roles that were granted to a user or group on a project or domain.",
    ),
    _Rule("identity:create_grant", _DOMAIN_MANAGER, "Grant a role."),
    _Rule("identity:revoke_grant", _DOMAIN_MANAGER, "Revoke a role."),
    *(
        _CloudRule(f"identity:{verb}_system_grant{plural}_for_{actor}", check, f"{what} on the system, of a {actor}.")
        for actor in ("user", "group")
        for verb, plural, check, what in (
            ("list", "s", _READER, "List roles"),
            ("check", "", _READER, "Check a role"),
            ("create", "", _ADMIN, "Grant a role"),
            ("revoke", "", _ADMIN, "Revoke a role"),
        )
    ),
]

CREDENTIALS = [
    _CloudRule("identity:get_application_credential", f"{_READER} or rule:owner", "Show an application credential."),
    _CloudRule("identity:list_application_credentials", f"{_READER} or rule:owner", "List application credentials."),
    Rule("identity:create_application_credential", "rule:owner", "Create an application credential."),
    _CloudRule(
        "identity:delete_application_credential",
        f"{_ADMIN} or rule:owner",
        "Delete an application credential.",
    ),
]

ACCESS_RULES = [
    _CloudRule("identity:get_access_rule", "rule:system_reader or rule:owner", "Show an access rule."),
    _CloudRule("identity:list_access_rules", "rule:system_reader or rule:owner", "List access rules."),
    _CloudRule(
        "identity:delete_access_rule",
        "(role:admin and system_scope:all) or rule:owner",
        "Delete an access rule.",
    ),
]

SECRETS = [
    _Rule("identity:get_credential", f"{_READER} or rule:owner", "Show a credential."),
    _Rule("identity:list_credentials", f"{_READER} or rule:owner", "List credentials; users see their own."),
    _Rule("identity:create_credential", f"{_ADMIN} or rule:owner", "Create a credential."),
    _Rule("identity:update_credential", f"{_ADMIN} or rule:owner", "Change a credential."),
    _Rule("identity:delete_credential", f"{_ADMIN} or rule:owner", "Delete a credential."),
    _Rule("identity:ec2_get_credential", f"{_READER} or rule:owner", "Show an EC2 credential."),
    _Rule("identity:ec2_list_credentials", f"{_READER} or rule:owner", "List EC2 credentials."),
    _Rule("identity:ec2_create_credential", f"{_ADMIN} or (role:member and rule:owner)", "Create an EC2 credential."),
    _Rule("identity:ec2_delete_credential", f"{_ADMIN} or (role:member and rule:owner)", "Delete an EC2 credential."),
    _Rule("identity:ec2tokens_validate", f"{_ADMIN} or rule:service_role", "Get a token for an EC2 signature."),
]

TRUSTS = [
    Rule("identity:create_trust", "rule:owner", "Create a trust, as its trustor."),
    _Rule("identity:list_trusts", _READER, "List all trusts."),
    _Rule("identity:list_trusts_for_trustor", f"{_READER} or rule:owner", "List the trusts that a user gives."),
    _Rule("identity:list_trusts_for_trustee", f"{_READER} or rule:owner", "List the trusts that a user was given."),
    _Rule("identity:get_trust", f"{_READER} or rule:owner", "Show a trust, as a party of it."),
    _Rule("identity:delete_trust", f"{_ADMIN} or rule:owner", "Delete a trust, as its trustor."),
    _Rule("identity:list_roles_for_trust", f"{_READER} or rule:owner", "List the roles of a trust."),
    _Rule("identity:get_role_for_trust", f"{_READER} or rule:owner", "Show a role of a trust."),
]

CATALOG = [
    _Rule("identity:get_region", _ANYBODY, "Show a region."),
    _Rule("identity:list_regions", _ANYBODY, "List regions."),
    *(
        _CloudRule(f"identity:{verb}_region", _ADMIN, f"{verb.title()} a region.")
        for verb in ("create", "update", "delete")
    ),
    *(
        _CloudRule(f"identity:{verb}_{noun}", check, f"{verb.title()} a {noun.rstrip('s')} of the catalog.")
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
    _Rule("identity:get_limit_model", _ANYBODY, "Show how limits are enforced."),
    _Rule(
        "identity:get_limit",
        f"{_READER} or domain_id:%(domain_id)s or rule:project_member",
        "Show a limit of a project or domain, with a token for it or for its domain.",
    ),
    _Rule("identity:list_limits", _ANYBODY, "List limits: those of the token's project or domain, or all."),
    _CloudRule("identity:create_limits", _ADMIN, "Create limits of projects and domains."),
    _CloudRule("identity:update_limit", _ADMIN, "Change a limit of a project or domain."),
    _CloudRule("identity:delete_limit", _ADMIN, "Delete a limit of a project or domain."),
    _Rule("identity:get_registered_limit", _ANYBODY, "Show a default limit."),
    _Rule("identity:list_registered_limits", _ANYBODY, "List default limits."),
    _CloudRule("identity:create_registered_limits", _ADMIN, "Create default limits."),
    _CloudRule("identity:update_registered_limit", _ADMIN, "Change a default limit."),
    _CloudRule("identity:delete_registered_limit", _ADMIN, "Delete a default limit."),
]

RULES = [
    *BASE, *TOKENS, *DOMAINS, *PROJECTS, *USERS, *GROUPS, *ROLES, *GRANTS, *CREDENTIALS, *ACCESS_RULES, *SECRETS,
    *TRUSTS, *CATALOG, *LIMITS,
]  # fmt: skip
