"""The queries of the image service. Every function runs in one transaction; see `micronova.db.engine`."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from micronova.neighbours.image.listing import Listing, Period
from micronova.neighbours.image.model import ACTIVE, DEACTIVATED, QUEUED, UPLOADING, Data, Image
from micronova.neighbours.image.tables import deleted_images, images, members, properties, tags, usage
from micronova.objects.errors import Conflict, TooLarge

_SECOND = 1_000_000
_COLUMNS = [column.name for column in images.columns]


@cache
def _select(dialect: str) -> sa.Select[Any]:
    """Select images with their tags and properties as JSON: one statement, whatever they have of them."""
    as_object, as_array = (
        (sa.func.json_object_agg, sa.func.json_agg)
        if dialect == "postgresql"
        else (sa.func.json_group_object, sa.func.json_group_array)
    )
    own_properties = sa.select(as_object(properties.c.name, properties.c.value)).where(
        properties.c.image_id == images.c.id
    )
    own_tags = sa.select(as_array(tags.c.tag)).where(tags.c.image_id == images.c.id)
    return sa.select(
        *images.columns,
        sa.type_coerce(own_properties.scalar_subquery(), sa.JSON).label("properties"),
        sa.type_coerce(own_tags.scalar_subquery(), sa.JSON).label("tags"),
        _membership(sa.bindparam("caller"), None).label("shared_with_caller"),
    )


@cache
def _by_id(dialect: str) -> sa.Select[Any]:
    return _select(dialect).where(images.c.id == sa.bindparam("image_id"))


def _membership(project: Any, status: str | None) -> sa.ColumnElement[bool]:
    found = sa.exists().where(members.c.image_id == images.c.id, members.c.member == project)
    return found.where(members.c.status == status) if status else found


def _image(row: Any) -> Image:
    values = dict(row._mapping)
    values["properties"] = values["properties"] or {}
    values["tags"] = tuple(sorted(values["tags"] or ()))
    values["shared_with_caller"] = bool(values["shared_with_caller"])
    return Image(**values)


def get(conn: sa.Connection, image_id: str, caller: str) -> Image | None:
    """Return an image, with whether it is shared with the caller's project."""
    row = conn.execute(_by_id(conn.dialect.name), {"image_id": image_id, "caller": caller}).one_or_none()
    return _image(row) if row is not None else None


def list_images(conn: sa.Connection, listing: Listing, caller: str, is_admin: bool) -> list[Image] | None:
    """Return a page of images that the caller may know of, and one more; None if there is no such marker."""
    statement = _select(conn.dialect.name).where(*_seen(listing, caller, is_admin), *_conditions(listing))
    if listing.marker is not None:
        mark = get(conn, listing.marker, caller)
        if mark is None or not mark.is_known_to(caller, is_admin):
            return None
        statement = statement.where(_after(listing.order, mark))
    order = [getattr(_sortable(key), direction)() for key, direction in listing.order]
    statement = statement.order_by(*order).limit(listing.limit + 1)
    return [_image(row) for row in conn.execute(statement, {"caller": caller})]


def _seen(listing: Listing, caller: str, is_admin: bool) -> list[sa.ColumnElement[bool]]:
    """Which images a list may hold: what the caller may know of, less other people's community images."""
    own = images.c.owner == caller if caller else sa.false()
    seen: list[sa.ColumnElement[bool]] = []
    if not is_admin:
        status = None if listing.member_status == "all" else listing.member_status
        invited = (
            sa.and_(images.c.visibility == "shared", _membership(caller, status)) if caller else sa.false()
        )
        seen.append(sa.or_(images.c.visibility.in_(("public", "community")), own, invited))
    if listing.visibility is None:
        seen.append(sa.or_(images.c.visibility != "community", own))
    elif listing.visibility != "all":
        seen.append(images.c.visibility == listing.visibility)
    return seen


def _conditions(listing: Listing) -> list[sa.ColumnElement[bool]]:
    found = [images.c[name] == value for name, value in listing.equal.items()]
    found += [images.c[name].in_(values) for name, values in listing.one_of.items()]
    if listing.size_min is not None:
        found.append(images.c.size >= listing.size_min)
    if listing.size_max is not None:
        found.append(images.c.size <= listing.size_max)
    found += [_in_period(period) for period in listing.times]
    for tag in listing.tags:
        found.append(sa.exists().where(tags.c.image_id == images.c.id, tags.c.tag == tag))
    for name, value in listing.properties.items():
        mine = sa.and_(
            properties.c.image_id == images.c.id, properties.c.name == name, properties.c.value == value
        )
        found.append(sa.exists().where(mine))
    return found


def _in_period(period: Period) -> sa.ColumnElement[bool]:
    column, begin, end = images.c[period.column], period.second, period.second + _SECOND
    conditions: dict[str, sa.ColumnElement[bool]] = {
        "gt": column >= end,
        "gte": column >= begin,
        "lt": column < begin,
        "lte": column < end,
        "eq": sa.and_(column >= begin, column < end),
        "neq": sa.or_(column < begin, column >= end),
    }
    return conditions[period.op]


def _sortable(key: str) -> sa.ColumnElement[Any]:
    # NULL sorts differently on the two databases and compares with nothing: give it a value below all others.
    column = images.c[key]
    if not column.nullable:
        return column
    return sa.func.coalesce(column, -1 if isinstance(column.type, sa.Integer) else "")


def _after(order: Sequence[tuple[str, str]], mark: Image) -> sa.ColumnElement[bool]:
    """Say "behind the marker" in the list's order: equal so far, and then further on."""
    behind: list[sa.ColumnElement[bool]] = []
    equal: list[sa.ColumnElement[bool]] = []
    for key, direction in order:
        column, value = _sortable(key), getattr(mark, key)
        if value is None:
            value = -1 if isinstance(images.c[key].type, sa.Integer) else ""
        behind.append(sa.and_(*equal, column > value if direction == "asc" else column < value))
        equal.append(column == value)
    return sa.or_(*behind)


def create(conn: sa.Connection, image: Image) -> None:
    """Insert an image; an id that exists, or has existed, is a Conflict."""
    used = conn.execute(
        sa.select(images.c.id)
        .where(images.c.id == image.id)
        .union_all(sa.select(deleted_images.c.id).where(deleted_images.c.id == image.id))
    ).first()
    values = {name: getattr(image, name) for name in _COLUMNS}
    inserted = 0 if used else conn.execute(_insert(conn, images).on_conflict_do_nothing(), values).rowcount
    if not inserted:
        raise Conflict(f"Image id {image.id} is in use, or was: choose another.")
    _write_properties(conn, image.id, {}, image.properties)
    _write_tags(conn, image.id, (), image.tags)


def replace(conn: sa.Connection, old: Image, new: Image, now: int) -> bool:
    """Write what differs between two versions of an image; False when somebody was faster."""
    changed = {name: getattr(new, name) for name in _COLUMNS if getattr(new, name) != getattr(old, name)}
    changed |= {"updated_at": now, "version": old.version + 1}
    if not _update(conn, old, changed):
        return False
    _write_properties(conn, old.id, old.properties, new.properties)
    _write_tags(conn, old.id, old.tags, new.tags)
    if new.owner != old.owner and old.size:
        _give_back(conn, old.owner, old.size)
        _charge(conn, new.owner, old.size, None)
    return True


def delete(conn: sa.Connection, image: Image, now: int) -> bool:
    """Delete an image, remember its id and give its bytes back; False when somebody changed it meanwhile."""
    gone = conn.execute(images.delete().where(images.c.id == image.id, images.c.version == image.version))
    if not gone.rowcount:
        return False
    conn.execute(deleted_images.insert(), {"id": image.id, "deleted_at": now})
    if image.size:
        _give_back(conn, image.owner, image.size)
    return True


def _update(conn: sa.Connection, image: Image, values: dict[str, Any]) -> bool:
    statement = images.update().where(images.c.id == image.id, images.c.version == image.version)
    return bool(conn.execute(statement.values(values)).rowcount)


def _write_properties(
    conn: sa.Connection, image_id: str, old: dict[str, str | None], new: dict[str, str | None]
) -> None:
    stale = [name for name in old if name not in new or new[name] != old[name]]
    if stale:
        conn.execute(
            properties.delete().where(properties.c.image_id == image_id, properties.c.name.in_(stale))
        )
    fresh = [
        {"image_id": image_id, "name": name, "value": value}
        for name, value in new.items()
        if name not in old or old[name] != value
    ]
    if fresh:
        conn.execute(properties.insert(), fresh)


def _write_tags(conn: sa.Connection, image_id: str, old: Sequence[str], new: Sequence[str]) -> None:
    stale, fresh = set(old) - set(new), set(new) - set(old)
    if stale:
        conn.execute(tags.delete().where(tags.c.image_id == image_id, tags.c.tag.in_(sorted(stale))))
    if fresh:
        conn.execute(tags.insert(), [{"image_id": image_id, "tag": tag} for tag in sorted(fresh)])


# --- uploads ---


def begin_upload(conn: sa.Connection, image_id: str, upload_id: str, status: str, now: int) -> bool:
    """Mark a queued image as being uploaded; False when it is not queued any more."""
    statement = images.update().where(images.c.id == image_id, images.c.status == QUEUED)
    values = {"status": status, "upload_id": upload_id, "version": images.c.version + 1, "updated_at": now}
    return bool(conn.execute(statement.values(values)).rowcount)


def finish_upload(
    conn: sa.Connection, image_id: str, upload_id: str, status: str, data: Data, limit: int | None, now: int
) -> bool:
    """Give an image its data and charge the owner; False when the image was deleted meanwhile."""
    mine = sa.and_(images.c.id == image_id, images.c.upload_id == upload_id)
    values = {**msgspec.structs.asdict(data), "status": status, "upload_id": None, "updated_at": now}
    statement = images.update().where(mine).values(**values, version=images.c.version + 1)
    row = conn.execute(statement.returning(images.c.owner)).one_or_none()
    if row is None:
        return False
    _charge(conn, row.owner, data.size, limit)
    return True


def abort_upload(conn: sa.Connection, image_id: str, upload_id: str, now: int) -> bool:
    """Put an image back to queued, if this upload is still the one under way."""
    mine = sa.and_(images.c.id == image_id, images.c.upload_id == upload_id)
    values = {"status": QUEUED, "upload_id": None, "version": images.c.version + 1, "updated_at": now}
    return bool(conn.execute(images.update().where(mine).values(values)).rowcount)


def take_over_upload(conn: sa.Connection, image_id: str, upload_id: str, by: str) -> bool:
    """Make a dead upload ours, to end it; False when it ended, or when somebody else was faster."""
    mine = sa.and_(images.c.id == image_id, images.c.upload_id == upload_id)
    return bool(conn.execute(images.update().where(mine).values(upload_id=by)).rowcount)


def holds_upload(conn: sa.Connection, image_id: str, upload_id: str) -> bool | None:
    """Say whether an image still waits for this upload; None when there is no such image.

    Run it with `write`: the row's lock makes it wait for a commit whose outcome the uploader did not learn.
    """
    found = sa.select(images.c.upload_id).where(images.c.id == image_id).with_for_update()
    row = conn.execute(found).one_or_none()
    return None if row is None else row.upload_id == upload_id


def uploads(conn: sa.Connection) -> list[tuple[str, str]]:
    """Return the image and the upload of every upload that is said to be under way."""
    found = sa.select(images.c.id, images.c.upload_id).where(images.c.upload_id.is_not(None))
    return [(row.id, row.upload_id) for row in conn.execute(found)]


def with_data(conn: sa.Connection, image_id: str | None = None) -> set[str]:
    """Return the ids of all images (or of this one) whose file must exist."""
    staged = sa.and_(images.c.status == UPLOADING, images.c.upload_id.is_(None))
    found = sa.select(images.c.id).where(sa.or_(images.c.status.in_((ACTIVE, DEACTIVATED)), staged))
    if image_id is not None:
        found = found.where(images.c.id == image_id)
    return set(conn.execute(found).scalars())


# --- what a project takes up ---


def used(conn: sa.Connection, project_id: str | None) -> int:
    """Return the bytes of image data that a project has."""
    return (
        conn.execute(sa.select(usage.c.bytes).where(usage.c.project_id == (project_id or ""))).scalar() or 0
    )


def _charge(conn: sa.Connection, project_id: str | None, size: int, limit: int | None) -> None:
    project = project_id or ""
    conn.execute(_insert(conn, usage).on_conflict_do_nothing(), {"project_id": project, "bytes": 0})
    more = usage.update().where(usage.c.project_id == project).values(bytes=usage.c.bytes + size)
    if limit is not None:
        more = more.where(usage.c.bytes + size <= limit)
    if not conn.execute(more).rowcount:
        raise TooLarge(f"The project may keep {limit} bytes of images: there is no room for {size} more.")


def _give_back(conn: sa.Connection, project_id: str | None, size: int) -> None:
    mine = usage.update().where(usage.c.project_id == (project_id or ""))
    conn.execute(mine.values(bytes=usage.c.bytes - size))


def _insert(conn: sa.Connection, table: sa.Table) -> Any:
    return (postgresql.insert if conn.dialect.name == "postgresql" else sqlite.insert)(table)
