"""Migrations as rows: each move of a server to another host or to another size.

During a move a server has two hosts. Its own row names the host that it belongs to; the other host of the migration
has a guest that arrives there or leaves it. ARCHITECTURE.md says which host is which at each step.
"""

from typing import TypedDict

from micronova.objects.instance import FlavorData


class MigrationRow(TypedDict):
    """A row of `migrations`. Times are microseconds since 1970 (UTC)."""

    id: int  # shown by the API
    uuid: str  # also the consumer that holds the resources of the source
    instance_uuid: str
    migration_type: str
    status: str
    source_compute: str
    source_node: str | None
    source_node_uuid: str | None
    source_zone: str | None
    dest_compute: str | None
    dest_node: str | None
    dest_host: str | None  # the address of the destination
    old_flavor: FlavorData
    new_flavor: FlavorData
    old_vm_state: str  # of the server, before the move
    user_id: str
    project_id: str
    request_id: str
    created_at: int
    updated_at: int | None


class MigrationChanges(TypedDict, total=False):
    """The columns of a migration that change."""

    status: str
    dest_compute: str | None
    dest_node: str | None
    dest_host: str | None
