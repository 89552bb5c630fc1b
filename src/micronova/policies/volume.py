"""The rules of the embedded volume service, with Cinder's names and defaults.

Cinder declares no scope types, so that its rules take tokens of any scope. Here resources belong to projects, and rules
take tokens for a project only. The role `service` suffices for compute's user to see and attach volumes, and to delete
those that go with their server, and the snapshots of an image that was not made.
"""

from micronova.policies.enforcer import Rule

ADMIN = "rule:admin_api"
READER = "rule:xena_system_admin_or_project_reader"
MEMBER = "rule:xena_system_admin_or_project_member"
SERVICE = "role:service"
READER_OR_SERVICE = f"{READER} or {SERVICE}"
MEMBER_OR_SERVICE = f"{MEMBER} or {SERVICE}"

RULES = (
    # what the other rules are made of
    Rule("context_is_admin", "role:admin", "See and change the resources of every project."),
    Rule("admin_api", "is_admin:True", "Administrators."),
    Rule(
        "xena_system_admin_or_project_reader",
        "role:admin or (role:reader and project_id:%(project_id)s)",
        "Administrators, and readers of the project.",
    ),
    Rule(
        "xena_system_admin_or_project_member",
        "role:admin or (role:member and project_id:%(project_id)s)",
        "Administrators, and members of the project.",
    ),
    # volumes
    Rule("volume:create", MEMBER, "Create a volume."),
    Rule("volume:create_from_image", MEMBER, "Create a volume of an image."),
    Rule("volume:multiattach", MEMBER, "Create a volume that can be attached to several servers."),
    Rule("volume:get", READER_OR_SERVICE, "Show a volume."),
    Rule("volume:get_all", READER_OR_SERVICE, "List volumes, and sum them up."),
    Rule("volume:update", MEMBER, "Change the name, the description and the metadata of a volume."),
    Rule("volume:delete", MEMBER_OR_SERVICE, "Delete a volume."),
    Rule("volume:force_delete", ADMIN, "Delete a volume in any status."),
    Rule("volume_extension:volume_host_attribute", ADMIN, "See which host has a volume."),
    Rule("volume_extension:volume_tenant_attribute", READER, "See the project of a volume."),
    Rule("volume_extension:volume_mig_status_attribute", ADMIN, "See how far the migration of a volume is."),
    Rule("volume_extension:volume_image_metadata:show", READER, "See the image metadata of a volume."),
    Rule("volume_extension:volume_image_metadata:set", MEMBER, "Change the image metadata of a volume."),
    Rule("volume_extension:volume_image_metadata:remove", MEMBER, "Remove image metadata of a volume."),
    Rule("volume:get_volume_metadata", READER, "Show the metadata of a volume."),
    Rule("volume:create_volume_metadata", MEMBER, "Add metadata to a volume."),
    Rule("volume:update_volume_metadata", MEMBER, "Change the metadata of a volume."),
    Rule("volume:delete_volume_metadata", MEMBER, "Remove metadata of a volume."),
    Rule("volume:extend", MEMBER, "Make a volume larger."),
    Rule("volume:extend_attached_volume", MEMBER, "Make a volume larger that is attached (since 3.42)."),
    Rule("volume:reimage", MEMBER_OR_SERVICE, "Replace the content of a volume by an image."),
    Rule("volume:reimage_reserved", MEMBER_OR_SERVICE, "The same of a volume that is reserved for a server."),
    Rule("volume:retype", MEMBER, "Change the type of a volume."),
    Rule("volume:revert_to_snapshot", MEMBER, "Revert a volume to its newest snapshot."),
    Rule("volume:update_readonly_flag", MEMBER, "Say whether a volume is read-only."),
    Rule("volume_extension:volume_admin_actions:reset_status", ADMIN, "Set the status of a volume."),
    Rule("volume_extension:volume_admin_actions:force_delete", ADMIN, "Delete a volume in any status."),
    Rule("volume_extension:volume_admin_actions:force_detach", ADMIN, "Detach a volume in any status."),
    Rule("volume_extension:volume_actions:upload_image", MEMBER, "Make an image of a volume."),
    Rule("volume_extension:volume_actions:upload_public", ADMIN, "Make a public image of a volume."),
    *(
        Rule(f"volume_extension:volume_actions:{name}", MEMBER_OR_SERVICE, f"The action os-{name} of a volume.")
        for name in (
            "reserve",
            "unreserve",
            "begin_detaching",
            "roll_detaching",
            "attach",
            "detach",
            "initialize_connection",
            "terminate_connection",
        )
    ),
    # attachments
    Rule("volume:attachment_create", MEMBER_OR_SERVICE, "Reserve a volume for a server."),
    Rule("volume:attachment_update", MEMBER_OR_SERVICE, "Connect a reserved volume to a host."),
    Rule("volume:attachment_complete", MEMBER_OR_SERVICE, "Say that a server has a volume."),
    Rule("volume:attachment_delete", MEMBER_OR_SERVICE, "Delete an attachment."),
    Rule(
        "volume:multiattach_bootable_volume",
        MEMBER_OR_SERVICE,
        "Attach a volume that boots and may have several servers.",
    ),
    # types
    Rule("volume_extension:type_get_all", READER, "List volume types."),
    Rule("volume_extension:type_get", READER, "Show a volume type."),
    Rule("volume_extension:type_create", ADMIN, "Create a volume type."),
    Rule("volume_extension:type_update", ADMIN, "Change a volume type."),
    Rule("volume_extension:type_delete", ADMIN, "Delete a volume type."),
    Rule("volume_extension:access_types_extra_specs", READER, "See extra specs beside a volume type."),
    Rule("volume_extension:access_types_qos_specs_id", ADMIN, "See the QoS specs of a volume type."),
    Rule("volume_extension:types_extra_specs:index", READER, "List extra specs."),
    Rule("volume_extension:types_extra_specs:show", READER, "Show an extra spec."),
    Rule("volume_extension:types_extra_specs:read_sensitive", ADMIN, "See the extra specs that are not for all."),
    Rule("volume_extension:types_extra_specs:create", ADMIN, "Add extra specs."),
    Rule("volume_extension:types_extra_specs:update", ADMIN, "Change an extra spec."),
    Rule("volume_extension:types_extra_specs:delete", ADMIN, "Remove an extra spec."),
    Rule("volume_extension:volume_type_access:get_all_for_type", ADMIN, "List the projects that may use a type."),
    Rule("volume_extension:volume_type_access:addProjectAccess", ADMIN, "Let a project use a type."),
    Rule("volume_extension:volume_type_access:removeProjectAccess", ADMIN, "Take a type from a project."),
    Rule("volume_extension:volume_encryption_metadata", READER_OR_SERVICE, "See how a volume is encrypted."),
    Rule("volume:get_encryption_key", SERVICE, "Read the key of a volume: for compute, whose hosts decrypt."),
    *(
        Rule(f"volume_extension:volume_type_encryption:{name}", ADMIN, f"The encryption of a volume type: {name}.")
        for name in ("get", "create", "update", "delete")
    ),
    Rule("volume_extension:default_get_all", ADMIN, "List the default types of projects."),
    Rule("volume_extension:default_get", ADMIN, "Show the default type of a project."),
    Rule("volume_extension:default_set_or_update", ADMIN, "Set the default type of a project."),
    Rule("volume_extension:default_unset", ADMIN, "Let a project have the default type of the cloud."),
    *(
        Rule(f"volume_extension:qos_specs_manage:{name}", ADMIN, f"QoS specs: {name}.")
        for name in ("get_all", "get", "create", "update", "delete")
    ),
    # quotas and services
    Rule("volume_extension:quotas:show", READER, "Show the quotas of a project."),
    Rule("volume_extension:quotas:update", ADMIN, "Change the quotas of a project."),
    Rule("volume_extension:quotas:delete", ADMIN, "Give a project the default quotas."),
    Rule("volume_extension:quota_classes:get", ADMIN, "Show the quotas of a class."),
    Rule("volume_extension:quota_classes:update", ADMIN, "Change the quotas of a class."),
    Rule("limits_extension:used_limits", READER, "Show what a project may use and uses."),
    Rule("volume_extension:services:index", ADMIN, "List services."),
    Rule("volume_extension:services:update", ADMIN, "Enable and disable services."),
    Rule("volume:freeze_host", ADMIN, "Keep the resources of a storage service as they are."),
    Rule("volume:thaw_host", ADMIN, "Let the resources of a storage service be changed again."),
    Rule("volume_extension:hosts", ADMIN, "See and change hosts, as Cinder's old API has them."),
    Rule("scheduler_extension:scheduler_stats:get_pools", ADMIN, "List pools."),
    Rule("volume_extension:capabilities", ADMIN, "Show the capabilities of a back end."),
    # messages and transfers
    Rule("message:get_all", READER, "List messages."),
    Rule("message:get", READER, "Show a message."),
    Rule("message:delete", MEMBER, "Delete a message."),
    Rule("volume:get_all_transfers", READER, "List transfers."),
    Rule("volume:get_transfer", READER, "Show a transfer."),
    Rule("volume:create_transfer", MEMBER, "Offer a volume to another project."),
    Rule("volume:accept_transfer", MEMBER, "Take a volume over."),
    Rule("volume:delete_transfer", MEMBER, "Take the offer of a volume back."),
    # backups
    Rule("backup:get_all", READER, "List backups."),
    Rule("backup:get", READER, "Show a backup."),
    Rule("backup:create", MEMBER, "Back a volume up."),
    Rule("backup:update", MEMBER, "Change the name, the description and the metadata of a backup."),
    Rule("backup:delete", MEMBER, "Delete a backup."),
    Rule("backup:restore", MEMBER, "Restore a backup."),
    Rule("backup:export-import", ADMIN, "Export the record of a backup."),
    Rule("backup:backup-import", ADMIN, "Import the record of a backup."),
    Rule("backup:backup_project_attribute", ADMIN, "See the project of a backup."),
    Rule("volume_extension:backup_admin_actions:reset_status", ADMIN, "Set the status of a backup."),
    Rule("volume_extension:backup_admin_actions:force_delete", ADMIN, "Delete a backup in any status."),
    # snapshots
    Rule("volume:get_snapshot_metadata", READER, "Show the metadata of a snapshot."),
    Rule("volume:update_snapshot_metadata", MEMBER, "Change the metadata of a snapshot."),
    Rule("volume:delete_snapshot_metadata", MEMBER, "Remove metadata of a snapshot."),
    Rule("volume:get_all_snapshots", READER_OR_SERVICE, "List snapshots."),
    Rule("volume:get_snapshot", READER_OR_SERVICE, "Show a snapshot."),
    Rule("volume:create_snapshot", MEMBER, "Create a snapshot."),
    Rule("volume:update_snapshot", MEMBER, "Change the name and the description of a snapshot."),
    Rule("volume:delete_snapshot", MEMBER_OR_SERVICE, "Delete a snapshot."),
    Rule("volume_extension:extended_snapshot_attributes", READER, "See the project and the progress of a snapshot."),
    Rule(
        "snapshot_extension:snapshot_actions:update_snapshot_status",
        MEMBER_OR_SERVICE,
        "Tell how far a snapshot is that compute makes.",
    ),
    Rule("volume_extension:snapshot_admin_actions:reset_status", ADMIN, "Set the status of a snapshot."),
    Rule("volume_extension:snapshot_admin_actions:force_delete", ADMIN, "Delete a snapshot in any status."),
)
