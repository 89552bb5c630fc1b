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
)
