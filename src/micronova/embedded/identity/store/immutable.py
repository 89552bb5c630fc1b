"""What cannot be changed: resources with the option `immutable`, and the domain of a resource."""

from msgspec import UNSET, UnsetType

from micronova.embedded.identity.attributes import ResourceOptions
from micronova.embedded.identity.store.kinds import DomainRow, GroupRow, ProjectRow, RoleRow, UserRow
from micronova.objects.errors import Forbidden, Invalid


def refuse_immutable(
    noun: str, row: DomainRow | ProjectRow | RoleRow, options: ResourceOptions | UnsetType = UNSET
) -> None:
    """Raise Forbidden if a resource is immutable, unless the new options end that."""
    ended = isinstance(options, ResourceOptions) and options.immutable in (False, None)
    if row["options"].get("immutable") and not ended:
        raise Forbidden(f"The {noun} {row['id']} is immutable: set its option immutable to false first.")


def refuse_other_domain(
    noun: str, row: UserRow | GroupRow | ProjectRow | RoleRow, domain_id: str | None | UnsetType
) -> None:
    """Raise Invalid if a change would move a resource to another domain; a role without a domain has the id ""."""
    if domain_id is not UNSET and (domain_id or "") != row["domain_id"]:
        raise Invalid(f"Invalid input for field/attribute {noun}.domain_id: a {noun} stays in its domain.")
