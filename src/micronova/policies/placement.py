"""The rules of the Placement API, with Placement's names, defaults and scope types."""

from micronova.policies.enforcer import Rule

ADMIN_OR_SERVICE = "rule:admin_or_service_api"
SERVICE = "rule:service_api"
READER = "rule:admin_or_project_reader_or_service_api"

RULES = [
    Rule("admin_api", "role:admin", "An administrator."),
    Rule("service_api", "role:service", "Another service of the cloud."),
    Rule("admin_or_service_api", "role:admin or role:service", "The default of most rules."),
    Rule("project_reader_api", "role:reader and project_id:%(project_id)s", "Who may read what a project has."),
    Rule(
        "admin_or_project_reader_or_service_api",
        "role:admin or rule:project_reader_api or role:service",
        "The default of rules about a project.",
    ),
    Rule("placement:resource_providers:list", ADMIN_OR_SERVICE, "List resource providers."),
    Rule("placement:resource_providers:create", ADMIN_OR_SERVICE, "Create a resource provider."),
    Rule("placement:resource_providers:show", ADMIN_OR_SERVICE, "Show a resource provider."),
    Rule("placement:resource_providers:update", ADMIN_OR_SERVICE, "Update a resource provider."),
    Rule("placement:resource_providers:delete", ADMIN_OR_SERVICE, "Delete a resource provider."),
    Rule("placement:resource_providers:inventories:list", ADMIN_OR_SERVICE, "List the inventories of a provider."),
    Rule("placement:resource_providers:inventories:create", ADMIN_OR_SERVICE, "Create an inventory."),
    Rule("placement:resource_providers:inventories:show", ADMIN_OR_SERVICE, "Show an inventory."),
    Rule("placement:resource_providers:inventories:update", ADMIN_OR_SERVICE, "Update inventories."),
    Rule("placement:resource_providers:inventories:delete", ADMIN_OR_SERVICE, "Delete inventories."),
    Rule("placement:resource_providers:aggregates:list", ADMIN_OR_SERVICE, "List the aggregates of a provider."),
    Rule("placement:resource_providers:aggregates:update", ADMIN_OR_SERVICE, "Update the aggregates of a provider."),
    Rule("placement:resource_providers:traits:list", ADMIN_OR_SERVICE, "List the traits of a provider."),
    Rule("placement:resource_providers:traits:update", ADMIN_OR_SERVICE, "Update the traits of a provider."),
    Rule("placement:resource_providers:traits:delete", ADMIN_OR_SERVICE, "Delete the traits of a provider."),
    Rule("placement:resource_providers:usages", ADMIN_OR_SERVICE, "Show what is used of a provider."),
    Rule("placement:resource_providers:allocations:list", ADMIN_OR_SERVICE, "List the allocations of a provider."),
    Rule("placement:resource_classes:list", ADMIN_OR_SERVICE, "List resource classes."),
    Rule("placement:resource_classes:create", ADMIN_OR_SERVICE, "Create a resource class."),
    Rule("placement:resource_classes:show", ADMIN_OR_SERVICE, "Show a resource class."),
    Rule("placement:resource_classes:update", ADMIN_OR_SERVICE, "Update a resource class."),
    Rule("placement:resource_classes:delete", ADMIN_OR_SERVICE, "Delete a resource class."),
    Rule("placement:traits:list", ADMIN_OR_SERVICE, "List traits."),
    Rule("placement:traits:show", ADMIN_OR_SERVICE, "Show a trait."),
    Rule("placement:traits:update", ADMIN_OR_SERVICE, "Create a trait."),
    Rule("placement:traits:delete", ADMIN_OR_SERVICE, "Delete a trait."),
    Rule("placement:allocations:list", ADMIN_OR_SERVICE, "List the allocations of a consumer."),
    Rule("placement:allocations:manage", ADMIN_OR_SERVICE, "Replace the allocations of several consumers."),
    Rule("placement:allocations:update", ADMIN_OR_SERVICE, "Replace the allocations of a consumer."),
    Rule("placement:allocations:delete", ADMIN_OR_SERVICE, "Delete the allocations of a consumer."),
    Rule("placement:allocation_candidates:list", ADMIN_OR_SERVICE, "List allocation candidates."),
    Rule("placement:usages", READER, "Show what a project uses."),
    Rule("placement:reshaper:reshape", SERVICE, "Replace inventories and allocations together."),
]
