"""The option `immutable` of domains, projects and roles."""

from msgspec import UNSET, UnsetType

from micronova.embedded.identity.attributes import ResourceOptions
from micronova.embedded.identity.store.kinds import DomainRow, ProjectRow, RoleRow
from micronova.objects.errors import Forbidden


def refuse_immutable(
    noun: str, row: DomainRow | ProjectRow | RoleRow, options: ResourceOptions | UnsetType = UNSET
) -> None:
    """Raise Forbidden if a resource is immutable, unless the new options end that."""
    ended = isinstance(options, ResourceOptions) and options.immutable in (False, None)
    if row["options"].get("immutable") and not ended:
        raise Forbidden(f"The {noun} {row['id']} is immutable: set its option immutable to false first.")
