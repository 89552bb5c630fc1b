"""The queries about the members of images: the projects that they are shared with."""

import msgspec
import sqlalchemy as sa

from micronova.db.upsert import insert_if_absent
from micronova.embedded.image.attributes import MAX_MEMBERS
from micronova.embedded.image.model import Member
from micronova.embedded.image.queries import no_image
from micronova.embedded.image.tables import images, members
from micronova.objects.errors import Conflict, TooLarge


def add(conn: sa.Connection, image_id: str, project_id: str, now: int) -> Member:
    """Share an image with a project; the new member is pending."""
    # The update locks the row of the image, so that concurrent requests cannot exceed the limit together.
    taken = conn.execute(images.update().where(images.c.id == image_id).values(revision=images.c.revision + 1))
    if not taken.rowcount:
        raise no_image(image_id)
    member = Member(image_id=image_id, member=project_id, status="pending", created_at=now, updated_at=now)
    if not insert_if_absent(conn, members, msgspec.structs.asdict(member)):
        raise Conflict(f"Image {image_id} is shared with project {project_id} already.")
    amount = sa.select(sa.func.count()).select_from(members).where(members.c.image_id == image_id)
    if conn.execute(amount).scalar_one() > MAX_MEMBERS:
        raise TooLarge(f"An image may be shared with {MAX_MEMBERS} projects.")
    return member


def get(conn: sa.Connection, image_id: str, project_id: str) -> Member | None:
    """Return a member, or None."""
    found = sa.select(members).where(members.c.image_id == image_id, members.c.member == project_id)
    row = conn.execute(found).one_or_none()
    return Member(**row._mapping) if row is not None else None


def list_members(conn: sa.Connection, image_id: str) -> list[Member]:
    """Return all members of an image, oldest first."""
    found = sa.select(members).where(members.c.image_id == image_id)
    return [Member(**row._mapping) for row in conn.execute(found.order_by(members.c.created_at, members.c.member))]


def set_status(conn: sa.Connection, image_id: str, project_id: str, status: str, now: int) -> Member | None:
    """Set the status of a member and return it; return None if there is no such member."""
    mine = members.update().where(members.c.image_id == image_id, members.c.member == project_id)
    conn.execute(mine.values(status=status, updated_at=now))
    return get(conn, image_id, project_id)


def remove(conn: sa.Connection, image_id: str, project_id: str) -> bool:
    """Stop sharing an image with a project; return whether it was shared."""
    mine = members.delete().where(members.c.image_id == image_id, members.c.member == project_id)
    return bool(conn.execute(mine).rowcount)
