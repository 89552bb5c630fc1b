"""The image service's rules, by Glance's names and with its defaults."""

from micronova.policies.enforcer import Rule

_OWNER_MEMBER = "role:member and project_id:%(project_id)s"
_OWNER_READER = "role:reader and project_id:%(project_id)s"
_SHARED_WITH_CALLER = "project_id:%(member_id)s"
_SEEN_BY_CALLER = (
    f"project_id:%(project_id)s or {_SHARED_WITH_CALLER} or 'community':%(visibility)s "
    "or 'public':%(visibility)s or 'shared':%(visibility)s"
)

ADMIN = "role:admin"
ADMIN_OR_OWNER_MEMBER = f"role:admin or ({_OWNER_MEMBER})"
ADMIN_OR_OWNER_READER = f"role:admin or ({_OWNER_READER})"
ADMIN_OR_FUTURE_OWNER = f"role:admin or ({_OWNER_MEMBER} and project_id:%(owner)s)"
# Whether an image is shared with this caller is not for rules to say: who may not know of it gets 404 before.
ADMIN_OR_SEEING_READER = f"role:admin or (role:reader and ({_SEEN_BY_CALLER}))"
ADMIN_OR_SEEING_MEMBER = f"role:admin or (role:member and ({_SEEN_BY_CALLER}))"
ADMIN_OR_INVITED = f"role:admin or (role:member and {_SHARED_WITH_CALLER})"
_OWNED_OR_SHARED = f"project_id:%(project_id)s or {_SHARED_WITH_CALLER}"
ADMIN_OR_OWNER_OR_INVITED = f"role:admin or (role:reader and ({_OWNED_OR_SHARED}))"

RULES = (
    Rule("default", "", "What a rule that names no other falls back to."),
    Rule("context_is_admin", ADMIN, "Who sees and changes the images of every project."),
    Rule("add_image", ADMIN_OR_FUTURE_OWNER, "Create an image."),
    Rule("get_image", ADMIN_OR_SEEING_READER, "Show an image."),
    Rule("get_images", ADMIN_OR_OWNER_READER, "List images."),
    Rule("modify_image", ADMIN_OR_OWNER_MEMBER, "Change an image's attributes, properties and tags."),
    Rule("delete_image", ADMIN_OR_OWNER_MEMBER, "Delete an image."),
    Rule("publicize_image", ADMIN, "Make an image public."),
    Rule("communitize_image", ADMIN_OR_OWNER_MEMBER, "Make an image a community image."),
    Rule("upload_image", ADMIN_OR_OWNER_MEMBER, "Upload an image's data."),
    Rule("download_image", ADMIN_OR_SEEING_MEMBER, "Download an image's data."),
    Rule("deactivate", ADMIN_OR_OWNER_MEMBER, "Withhold an active image's data."),
    Rule("reactivate", ADMIN_OR_OWNER_MEMBER, "Give a deactivated image's data out again."),
    Rule("add_member", ADMIN_OR_OWNER_MEMBER, "Share an image with a project."),
    Rule("delete_member", ADMIN_OR_OWNER_MEMBER, "Stop sharing an image with a project."),
    Rule("get_member", ADMIN_OR_OWNER_OR_INVITED, "Show one project that an image is shared with."),
    Rule("get_members", ADMIN_OR_OWNER_OR_INVITED, "List the projects that an image is shared with."),
    Rule("modify_member", ADMIN_OR_INVITED, "Accept or reject an image that is shared with one's project."),
    Rule("stores_info_detail", ADMIN, "Show details of the stores."),
)
