"""The rules of the embedded image service, with Glance's names, defaults and scope types."""

from micronova.policies.enforcer import ANY_SCOPE, Rule

_OWNER_MEMBER = "role:member and project_id:%(project_id)s"
_OWNER_READER = "role:reader and project_id:%(project_id)s"
_SHARED_WITH_CALLER = "project_id:%(member_id)s"
_VISIBLE_TO_CALLER = (
    f"project_id:%(project_id)s or {_SHARED_WITH_CALLER} or 'community':%(visibility)s "
    "or 'public':%(visibility)s or 'shared':%(visibility)s"
)

ADMIN = "rule:context_is_admin"
ADMIN_OR_OWNER_MEMBER = f"{ADMIN} or ({_OWNER_MEMBER})"
ADMIN_OR_OWNER_READER = f"{ADMIN} or ({_OWNER_READER})"
ADMIN_OR_FUTURE_OWNER = f"{ADMIN} or ({_OWNER_MEMBER} and project_id:%(owner)s)"
# The rules accept every shared image: the service has already answered 404 if it is not shared with the caller.
ADMIN_OR_VISIBLE_TO_READER = f"{ADMIN} or (role:reader and ({_VISIBLE_TO_CALLER}))"
ADMIN_OR_VISIBLE_TO_MEMBER = f"{ADMIN} or (role:member and ({_VISIBLE_TO_CALLER}))"
ADMIN_OR_SHARED_WITH_MEMBER = f"{ADMIN} or (role:member and {_SHARED_WITH_CALLER})"
_OWNED_OR_SHARED = f"project_id:%(project_id)s or {_SHARED_WITH_CALLER}"
ADMIN_OR_OWNER_OR_SHARED_WITH = f"{ADMIN} or (role:reader and ({_OWNED_OR_SHARED}))"
ADMIN_OR_SEES_NAMESPACE = f"{ADMIN} or (role:reader and (project_id:%(project_id)s or 'public':%(visibility)s))"
_METADEF_ADMIN = "rule:metadef_admin"

_METADEFS = (
    Rule("metadef_default", "", "The rule for metadata definitions without one of their own."),
    Rule("metadef_admin", ADMIN, "Who may change metadata definitions."),
    Rule("get_metadef_namespace", ADMIN_OR_SEES_NAMESPACE, "Show a namespace of metadata definitions."),
    Rule("get_metadef_namespaces", ADMIN_OR_OWNER_READER, "List namespaces."),
    Rule("modify_metadef_namespace", _METADEF_ADMIN, "Change a namespace."),
    Rule("add_metadef_namespace", _METADEF_ADMIN, "Create a namespace."),
    Rule("delete_metadef_namespace", _METADEF_ADMIN, "Delete a namespace, or all objects or properties of it."),
    Rule("get_metadef_object", ADMIN_OR_SEES_NAMESPACE, "Show an object."),
    Rule("get_metadef_objects", ADMIN_OR_SEES_NAMESPACE, "List the objects of a namespace."),
    Rule("modify_metadef_object", _METADEF_ADMIN, "Change an object."),
    Rule("add_metadef_object", _METADEF_ADMIN, "Create an object."),
    Rule("delete_metadef_object", _METADEF_ADMIN, "Delete an object."),
    Rule("list_metadef_resource_types", ADMIN_OR_SEES_NAMESPACE, "List all resource types."),
    Rule("get_metadef_resource_type", ADMIN_OR_SEES_NAMESPACE, "List the resource types of a namespace."),
    Rule("add_metadef_resource_type_association", _METADEF_ADMIN, "Associate a namespace with a resource type."),
    Rule("remove_metadef_resource_type_association", _METADEF_ADMIN, "Remove such an association."),
    Rule("get_metadef_property", ADMIN_OR_SEES_NAMESPACE, "Show a property."),
    Rule("get_metadef_properties", ADMIN_OR_SEES_NAMESPACE, "List the properties of a namespace."),
    Rule("modify_metadef_property", _METADEF_ADMIN, "Change a property."),
    Rule("add_metadef_property", _METADEF_ADMIN, "Create a property."),
    Rule("remove_metadef_property", _METADEF_ADMIN, "Delete a property."),
    Rule("get_metadef_tag", ADMIN_OR_SEES_NAMESPACE, "Show a tag."),
    Rule("get_metadef_tags", ADMIN_OR_SEES_NAMESPACE, "List the tags of a namespace."),
    Rule("modify_metadef_tag", _METADEF_ADMIN, "Change a tag."),
    Rule("add_metadef_tag", _METADEF_ADMIN, "Create a tag."),
    Rule("add_metadef_tags", _METADEF_ADMIN, "Set the tags of a namespace."),
    Rule("delete_metadef_tag", _METADEF_ADMIN, "Delete a tag."),
    Rule("delete_metadef_tags", _METADEF_ADMIN, "Delete all tags of a namespace."),
)

RULES = (
    Rule("default", "", "The rule for operations without one of their own.", ANY_SCOPE),
    Rule("context_is_admin", "role:admin", "See and change the images of every project."),
    Rule("service_api", "role:service or role:admin", "The user of another service, or an administrator."),
    Rule("add_image", ADMIN_OR_FUTURE_OWNER, "Create an image."),
    Rule("get_image", ADMIN_OR_VISIBLE_TO_READER, "Show an image."),
    Rule("get_images", ADMIN_OR_OWNER_READER, "List images."),
    Rule("modify_image", ADMIN_OR_OWNER_MEMBER, "Change an image's attributes, properties and tags."),
    Rule("delete_image", ADMIN_OR_OWNER_MEMBER, "Delete an image."),
    Rule("publicize_image", ADMIN, "Make an image public."),
    Rule("communitize_image", ADMIN_OR_OWNER_MEMBER, "Make an image a community image."),
    Rule("upload_image", ADMIN_OR_OWNER_MEMBER, "Upload an image's data."),
    Rule("download_image", ADMIN_OR_VISIBLE_TO_MEMBER, "Download an image's data."),
    Rule("deactivate", ADMIN_OR_OWNER_MEMBER, "Deactivate an image."),
    Rule("reactivate", ADMIN_OR_OWNER_MEMBER, "Reactivate an image."),
    Rule("add_member", ADMIN_OR_OWNER_MEMBER, "Share an image with a project."),
    Rule("delete_member", ADMIN_OR_OWNER_MEMBER, "Stop sharing an image with a project."),
    Rule("get_member", ADMIN_OR_OWNER_OR_SHARED_WITH, "Show a project that an image is shared with."),
    Rule("get_members", ADMIN_OR_OWNER_OR_SHARED_WITH, "List the projects that an image is shared with."),
    Rule("modify_member", ADMIN_OR_SHARED_WITH_MEMBER, "Accept or reject an image that is shared with one's project."),
    Rule("stores_info_detail", f"{ADMIN} or rule:service_api", "Show details of the stores."),
    Rule("tasks_api_access", ADMIN, "Use the API of tasks."),
    Rule("get_task", "rule:default", "Show a task, for callers that may use the API of tasks."),
    Rule("get_tasks", "rule:default", "List tasks, for callers that may use the API of tasks."),
    Rule("add_task", "rule:default", "Create a task, for callers that may use the API of tasks."),
    Rule("modify_task", "rule:default", "Nothing here: tasks cannot be changed."),
    *_METADEFS,
)
