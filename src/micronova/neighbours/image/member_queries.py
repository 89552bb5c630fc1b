"""The queries about projects that images are shared with."""

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from micronova.neighbours.image.attributes import MAX_MEMBERS
from micronova.neighbours.image.model import Member
from micronova.neighbours.image.tables import images, members
from micronova.objects.errors import Conflict, NotFound, TooLarge


def add(conn: sa.Connection, image_id: str, project_id: str, now: int) -> Member:
    """Share an image with a project, which has yet to accept it."""
    # Taking the image's row makes those who share it at the same time wait, so that the amount holds.
    taken = conn.execute(images.update().where(images.c.id == image_id).values(version=images.c.version + 1))
    if not taken.rowcount:
        raise NotFound(f"No image found with ID {image_id}.")
    member = Member(image_id=image_id, member=project_id, status="pending", created_at=now, updated_at=now)
    insert = (postgresql.insert if conn.dialect.name == "postgresql" else sqlite.insert)(members)
    values = msgspec.structs.asdict(member)
    if not conn.execute(insert.on_conflict_do_nothing(), values).rowcount:
        raise Conflict(f"Image {image_id} is shared with project {project_id} already.")
    amount = sa.select(sa.func.count()).select_from(members).where(members.c.image_id == image_id)
    if conn.execute(amount).scalar_one() > MAX_MEMBERS:
        raise TooLarge(f"An image may be shared with {MAX_MEMBERS} projects.")
    return member


def get(conn: sa.Connection, image_id: str, project_id: str) -> Member | None:
    """Return one member."""
    found = sa.select(members).where(members.c.image_id == image_id, members.c.member == project_id)
    row = conn.execute(found).one_or_none()
    return Member(**row._mapping) if row is not None else None


def list_members(conn: sa.Connection, image_id: str) -> list[Member]:
    """Return all members of an image, the oldest first."""
    found = sa.select(members).where(members.c.image_id == image_id)
    return [
        Member(**row._mapping) for row in conn.execute(found.order_by(members.c.created_at, members.c.member))
    ]


def set_status(conn: sa.Connection, image_id: str, project_id: str, status: str, now: int) -> Member | None:
    """Write down what a project said to the invitation."""
    mine = members.update().where(members.c.image_id == image_id, members.c.member == project_id)
    conn.execute(mine.values(status=status, updated_at=now))
    return get(conn, image_id, project_id)


def remove(conn: sa.Connection, image_id: str, project_id: str) -> bool:
    """Stop sharing an image with a project."""
    mine = members.delete().where(members.c.image_id == image_id, members.c.member == project_id)
    return bool(conn.execute(mine).rowcount)
