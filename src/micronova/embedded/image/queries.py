"""The queries about images, their uploads and the usage of projects. Every function runs in one transaction."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
import sqlalchemy as sa

from micronova.db import keyset
from micronova.db.keyset import SortKey
from micronova.db.prepared import Prepared
from micronova.db.upsert import insert_if_absent
from micronova.embedded.common import revisions
from micronova.embedded.image.listing import SECOND, Listing, TimeComparison
from micronova.embedded.image.model import ACTIVE, DEACTIVATED, QUEUED, UPLOADING, DataSummary, Image, UploadState
from micronova.embedded.image.tables import deleted_images, images, members, properties, reservations, tags, usage
from micronova.objects.errors import Conflict, Invalid, NotFound, TooLarge

PAGE_BYTES = 2 << 20  # of tags and properties in a page of a list
RETRY_AFTER = 5  # seconds, for an upload that is refused because its project has too many under way
READ_TOGETHER = 50  # images of a list; each may have 64 KiB of properties
DELETED_KEPT = 30 * 86_400 * 1_000_000  # microseconds for which the id of a deleted image cannot be used again
FORGOTTEN_TOGETHER = 10  # older ids that each delete of an image forgets
NO_FORMATS = "Set 'disk_format' and 'container_format' of the image before uploading its data."
_COLUMNS = [column.key for column in images.columns]


def _project_of(owner: str | None) -> str:
    """Return the project whose usage has the images of an owner; that of images without an owner is ""."""
    return owner or ""


def no_image(image_id: str) -> NotFound:
    """Return the error for an image that does not exist or that the caller may not see."""
    return NotFound(f"There is no image {image_id[:64]}.")


@cache
def _select(dialect: str) -> sa.Select[Any]:
    """Return the select of images with their tags and properties as JSON, in one statement."""
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
        *(column.label(column.key) for column in images.columns),
        sa.type_coerce(own_properties.scalar_subquery(), sa.JSON).label("properties"),
        sa.type_coerce(own_tags.scalar_subquery(), sa.JSON).label("tags"),
        _membership(sa.bindparam("caller"), None).label("shared_with_caller"),
    )


_BY_ID = Prepared(lambda conn: _select(conn.dialect.name).where(images.c.id == sa.bindparam("image_id")))


def _membership(project: Any, status: str | None) -> sa.ColumnElement[bool]:
    found = sa.exists().where(members.c.image_id == images.c.id, members.c.member == project)
    return found.where(members.c.status == status) if status else found


def _image(row: Mapping[str, Any]) -> Image:
    found = {
        "properties": row["properties"] or {},
        "tags": tuple(sorted(row["tags"] or ())),
        "shared_with_caller": bool(row["shared_with_caller"]),
    }
    return Image(**{**row, **found})


def get(conn: sa.Connection, image_id: str, caller: str) -> Image | None:
    """Return an image, with whether it is shared with the caller's project; None if there is none."""
    row = _BY_ID.first(conn, {"image_id": image_id, "caller": caller})
    return _image(row) if row is not None else None


def list_images(conn: sa.Connection, listing: Listing, caller: str, is_admin: bool) -> tuple[list[Image], bool] | None:
    """Return a page of images that the caller may see, and whether more follow; None if the marker is none of them.

    A page ends early, after at least one image, when its tags and properties have `PAGE_BYTES`: users choose them.
    """
    after = None
    if listing.marker is not None:
        mark = get(conn, listing.marker, caller)
        if mark is None or not mark.is_visible_to(caller, is_admin):
            return None
        after = [getattr(mark, name) for name, _ in listing.order]
    keys = [SortKey(images.c[name], descending) for name, descending in listing.order]
    conditions = _conditions(listing)
    parts = [[part, *conditions] for part in _visible(listing, caller, is_admin)]
    found: list[Image] = []
    more, left = True, PAGE_BYTES
    while more and left > 0:
        wanted = min(listing.limit - len(found), READ_TOGETHER)
        # Each part gives its first rows by an index; an OR would walk the images of all projects.
        firsts = [keyset.page(sa.select(images.c.id).where(*part), keys, after, wanted + 1) for part in parts]
        ids = sa.union_all(*(sa.select(first.subquery().c.id) for first in firsts))
        statement = _select(conn.dialect.name).where(images.c.id.in_(ids))
        rows, more = keyset.fetch(conn, statement, keys, None, wanted, {"caller": caller})
        for row in rows:
            if found and left <= 0:
                return found, True
            found.append(_image(row._asdict()))
            left -= found[-1].text_bytes
        if len(found) >= listing.limit:
            break
        after = [getattr(found[-1], name) for name, _ in listing.order] if found else after
    return found, more


def _visible(listing: Listing, caller: str, is_admin: bool) -> list[sa.ColumnElement[bool]]:
    """Return the parts of what the caller may see; community images of others only if the query asks for them.

    A part is a condition that an index serves. An image may be in several parts.
    """
    visibility, wanted = images.c.visibility, listing.visibility
    mine = images.c.owner == caller if caller else sa.false()
    if is_admin:
        if wanted is None:
            return [sa.or_(visibility != "community", mine)]
        return [sa.true() if wanted == "all" else visibility == wanted]
    status = None if listing.member_status == "all" else listing.member_status
    of_caller = sa.select(members.c.image_id).where(members.c.member == caller)
    if status:
        of_caller = of_caller.where(members.c.status == status)
    invited = sa.and_(visibility == "shared", images.c.id.in_(of_caller)) if caller else sa.false()
    public, community = visibility == "public", visibility == "community"
    parts = {
        None: [public, mine, invited],
        "all": [public, community, mine, invited],
        "public": [public],
        "community": [community],
        "shared": [sa.and_(mine, visibility == "shared"), invited],
        "private": [sa.and_(mine, visibility == "private")],
    }
    return parts[wanted]


def _conditions(listing: Listing) -> list[sa.ColumnElement[bool]]:
    found = [images.c[name] == value for name, value in listing.equal.items()]
    found += [images.c[name].in_(values) for name, values in listing.one_of.items()]
    if listing.size_min is not None:
        found.append(images.c.size >= listing.size_min)
    if listing.size_max is not None:
        found.append(images.c.size <= listing.size_max)
    found += [_compares(comparison) for comparison in listing.times]
    for tag in listing.tags:
        found.append(sa.exists().where(tags.c.image_id == images.c.id, tags.c.tag == tag))
    for name, value in listing.properties.items():
        mine = sa.and_(properties.c.image_id == images.c.id, properties.c.name == name, properties.c.value == value)
        found.append(sa.exists().where(mine))
    return found


def _compares(comparison: TimeComparison) -> sa.ColumnElement[bool]:
    column, begin, end = images.c[comparison.column], comparison.second, comparison.second + SECOND
    conditions: dict[str, sa.ColumnElement[bool]] = {
        "gt": column >= end,
        "gte": column >= begin,
        "lt": column < begin,
        "lte": column < end,
        "eq": sa.and_(column >= begin, column < end),
        "neq": sa.or_(column < begin, column >= end),
    }
    return conditions[comparison.op]


_WAS_DELETED = Prepared(sa.select(deleted_images.c.id).where(deleted_images.c.id == sa.bindparam("image_id")))
_ADD_PROPERTY = Prepared(properties.insert())


def create(conn: sa.Connection, image: Image, max_images: int | None = None) -> None:
    """Insert an image; raise Conflict if its id is or was in use, TooLarge if its owner has `max_images` images."""
    if max_images is not None:
        _lock_usage(conn, _project_of(image.owner))
        if count(conn, image.owner) >= max_images:
            raise TooLarge(f"The project has {max_images} images already, and may not have more: delete some.")
    values = {name: getattr(image, name) for name in _COLUMNS}
    if _WAS_DELETED.first(conn, {"image_id": image.id}) or not insert_if_absent(conn, images, values):
        raise Conflict(f"Image id {image.id} is in use, or was: choose another.")
    _write_properties(conn, image.id, {}, image.properties)
    _write_tags(conn, image.id, (), image.tags)


def replace(conn: sa.Connection, old: Image, new: Image, now: int) -> None:
    """Write what differs between two revisions of an image; raise Changed if the row is not `old` any more."""
    changed = {name: getattr(new, name) for name in _COLUMNS if getattr(new, name) != getattr(old, name)}
    revisions.update(conn, images.c.revision, old.id, old.revision, changed, now)
    _write_properties(conn, old.id, old.properties, new.properties)
    _write_tags(conn, old.id, old.tags, new.tags)
    if new.owner != old.owner and old.size:
        _release(conn, old.owner, old.size)
        _charge(conn, new.owner, old.size, None)


def delete(conn: sa.Connection, image: Image, now: int) -> None:
    """Delete an image, keep its id and reduce the usage of its owner; raise Changed."""
    revisions.delete(conn, images.c.revision, image.id, image.revision)
    conn.execute(deleted_images.insert(), {"id": image.id, "deleted_at": now})
    conn.execute(_FORGET, {"before": now - DELETED_KEPT})
    if image.size:
        _release(conn, image.owner, image.size)


_FORGET = deleted_images.delete().where(
    deleted_images.c.id.in_(
        sa.select(deleted_images.c.id)
        .where(deleted_images.c.deleted_at < sa.bindparam("before"))
        .order_by(deleted_images.c.deleted_at)
        .limit(FORGOTTEN_TOGETHER)
        .with_for_update(skip_locked=True)  # another delete forgets those
    )
)


def _write_properties(
    conn: sa.Connection, image_id: str, old: dict[str, str | None], new: dict[str, str | None]
) -> None:
    stale = [name for name in old if name not in new or new[name] != old[name]]
    if stale:
        conn.execute(properties.delete().where(properties.c.image_id == image_id, properties.c.name.in_(stale)))
    fresh = [
        {"image_id": image_id, "name": name, "value": value}
        for name, value in new.items()
        if name not in old or old[name] != value
    ]
    _ADD_PROPERTY.run_each(conn, fresh)


def _write_tags(conn: sa.Connection, image_id: str, old: Sequence[str], new: Sequence[str]) -> None:
    stale, fresh = set(old) - set(new), set(new) - set(old)
    if stale:
        conn.execute(tags.delete().where(tags.c.image_id == image_id, tags.c.tag.in_(sorted(stale))))
    if fresh:
        conn.execute(tags.insert(), [{"image_id": image_id, "tag": tag} for tag in sorted(fresh)])


# --- uploads ---


_BEGIN_UPLOAD = Prepared(
    images.update()
    .where(images.c.id == sa.bindparam("image_id"), images.c.status == QUEUED)
    .values(
        status=sa.bindparam("during"),
        upload_id=sa.bindparam("upload"),
        disk_format=sa.bindparam("disk"),
        container_format=sa.bindparam("container"),
        revision=images.c.revision + 1,
        updated_at=sa.bindparam("now"),
    )
)
_RESERVE = Prepared(reservations.insert())
_RESERVED_OF = Prepared(
    sa.select(sa.func.coalesce(sa.func.sum(reservations.c.bytes), 0).label("bytes")).where(
        reservations.c.project_id == sa.bindparam("project")
    )
)
_LOCK_USAGE = Prepared(sa.select(usage.c.bytes).where(usage.c.project_id == sa.bindparam("project")).with_for_update())
_END_RESERVATION = Prepared(reservations.delete().where(reservations.c.upload_id == sa.bindparam("upload")))


def begin_upload(
    conn: sa.Connection,
    image: Image,
    upload_id: str,
    status: str,
    now: int,
    *,
    max_uploads: int | None = None,
    size: int = 0,
    max_bytes: int | None = None,
) -> bool:
    """Set the status and the upload of a queued image; return False if it is not queued.

    The row gets the formats of `image`, because the data is checked against these. Raise TooLarge if the owner has
    `max_uploads` under way, or if `max_bytes` leave no room for `size` more. With `max_bytes` the upload reserves that
    size.
    """
    if max_uploads is not None:
        _check_uploads(conn, image.owner, max_uploads)
    project = _project_of(image.owner)
    if max_bytes is not None and size > _room(conn, project, max_bytes):
        raise _no_room(max_bytes, size)
    formats = {"disk": image.disk_format, "container": image.container_format}
    begun = _BEGIN_UPLOAD.run(
        conn, {"image_id": image.id, "upload": upload_id, "during": status, "now": now, **formats}
    )
    if begun and max_bytes is not None:
        _RESERVE.run(conn, {"upload_id": upload_id, "image_id": image.id, "project_id": project, "bytes": size})
    return bool(begun)


def load_and_begin_upload(
    conn: sa.Connection,
    image_id: str,
    formats: Mapping[str, str],
    upload_id: str,
    status: str,
    now: int,
    *,
    max_uploads: int | None = None,
    size: int = 0,
    max_bytes: int | None = None,
) -> Image | None:
    """Begin an upload of an image, which gets these formats, as `begin_upload` does; return the image.

    It has another `upload_id` if it is not queued. Return None if there is none, raise Invalid if a format is missing.
    """
    found = get(conn, image_id, "")
    if found is None:
        return None
    image = msgspec.structs.replace(found, **formats)
    if image.disk_format is None or image.container_format is None:
        raise Invalid(NO_FORMATS)
    limits: dict[str, Any] = {"max_uploads": max_uploads, "size": size, "max_bytes": max_bytes}
    if found.upload_id is not None or not begin_upload(conn, image, upload_id, status, now, **limits):
        return image
    return msgspec.structs.replace(image, status=status, upload_id=upload_id, revision=found.revision + 1)


def reserve(conn: sa.Connection, upload_id: str, size: int, wanted: int, max_bytes: int) -> int | None:
    """Reserve what an upload writes: at least `size` bytes in all, `wanted` if there is room; return how many.

    Return None if the upload is not under way any more, raise TooLarge if `max_bytes` leaves no room for `size`.
    """
    mine = reservations.c.upload_id == upload_id
    row = conn.execute(sa.select(reservations.c.project_id, reservations.c.bytes).where(mine)).one_or_none()
    if row is None:
        return None
    if row.bytes >= size:
        return int(row.bytes)
    most = row.bytes + _room(conn, row.project_id, max_bytes)
    if size > most:
        raise _no_room(max_bytes, size)
    granted = min(wanted, most)
    done = conn.execute(reservations.update().where(mine).values(bytes=granted))
    return granted if done.rowcount else None


def _room(conn: sa.Connection, project: str, max_bytes: int) -> int:
    """Return how many of these bytes are neither used nor reserved; others wait until this transaction ends."""
    used = _lock_usage(conn, project)
    (reserved,) = _RESERVED_OF.all(conn, {"project": project})
    return max_bytes - used - int(reserved["bytes"])


def _lock_usage(conn: sa.Connection, project: str) -> int:
    """Lock the usage of a project and return it: of two transactions the second waits, and then sees the first."""
    locked = _LOCK_USAGE.all(conn, {"project": project})
    if not locked:
        insert_if_absent(conn, usage, {"project_id": project, "bytes": 0})
        locked = _LOCK_USAGE.all(conn, {"project": project})
    return int(locked[0]["bytes"])


def _end_reservation(conn: sa.Connection, upload_id: str) -> None:
    _END_RESERVATION.run(conn, {"upload": upload_id})


def _check_uploads(conn: sa.Connection, owner: str | None, max_uploads: int) -> None:
    _lock_usage(conn, _project_of(owner))
    under_way = sa.select(sa.func.count()).where(images.c.owner == owner, images.c.upload_id.is_not(None))
    if conn.execute(under_way).scalar_one() >= max_uploads:
        message = f"The project may have {max_uploads} uploads under way: wait until one has ended."
        raise TooLarge(message, retry_after=RETRY_AFTER)


def _is_upload_of(image_id: str, upload_id: str) -> sa.ColumnElement[bool]:
    return sa.and_(images.c.id == image_id, images.c.upload_id == upload_id)


_FINISH_UPLOAD = Prepared(
    images.update()
    .where(images.c.id == sa.bindparam("image_id"), images.c.upload_id == sa.bindparam("upload"))
    .values(
        {name: sa.bindparam(name) for name in (*DataSummary.__struct_fields__, "status", "updated_at")}
        | {"upload_id": None, "revision": images.c.revision + 1}
    )
    .returning(images.c.owner)
)


def finish_upload(
    conn: sa.Connection,
    image_id: str,
    upload_id: str,
    status: str,
    summary: DataSummary,
    max_bytes: int | None,
    now: int,
) -> bool:
    """Set the data of an image and add it to the usage of its owner; return False if the image is gone.

    Raise TooLarge if the owner would keep more than `max_bytes`.
    """
    mine = {"image_id": image_id, "upload": upload_id}
    changes = {**msgspec.structs.asdict(summary), "status": status, "updated_at": now}
    row = _FINISH_UPLOAD.first(conn, {**mine, **changes})
    if row is None:
        return False
    _end_reservation(conn, upload_id)
    _charge(conn, row["owner"], summary.size, max_bytes)
    return True


def abort_upload(conn: sa.Connection, image_id: str, upload_id: str, now: int) -> bool:
    """Set an image back to queued; return False if this is not its upload any more."""
    _end_reservation(conn, upload_id)
    mine = _is_upload_of(image_id, upload_id)
    return bool(revisions.touch(conn, images.c.revision, mine, now=now, status=QUEUED, upload_id=None))


def take_over_upload(conn: sa.Connection, image_id: str, upload_id: str, by: str) -> bool:
    """Replace the dead upload of an image by another; return False if it is not its upload any more."""
    mine = _is_upload_of(image_id, upload_id)
    taken = bool(conn.execute(images.update().where(mine).values(upload_id=by)).rowcount)
    if taken:
        _end_reservation(conn, upload_id)
    return taken


def upload_state(conn: sa.Connection, image_id: str, upload_id: str) -> UploadState:
    """Return what the row of an image says about an upload of it.

    Run it with `write`: it waits for the lock of the row, and so for a commit whose outcome is unknown.
    """
    found = sa.select(images.c.upload_id).where(images.c.id == image_id).with_for_update()
    row = conn.execute(found).one_or_none()
    if row is None:
        return UploadState.IMAGE_DELETED
    return UploadState.RUNNING if row.upload_id == upload_id else UploadState.ENDED


def uploads(conn: sa.Connection) -> list[tuple[str, str]]:
    """Return the image id and the upload id of every upload."""
    found = sa.select(images.c.id, images.c.upload_id).where(images.c.upload_id.is_not(None))
    return [(row.id, row.upload_id) for row in conn.execute(found)]


def with_data(conn: sa.Connection) -> set[str]:
    """Return the ids of all images that have a file."""
    staged = sa.and_(images.c.status == UPLOADING, images.c.upload_id.is_(None))
    found = sa.select(images.c.id).where(sa.or_(images.c.status.in_((ACTIVE, DEACTIVATED)), staged))
    return set(conn.execute(found).scalars())


# --- usage of projects ---


def used(conn: sa.Connection, project_id: str | None) -> int:
    """Return how many bytes of image data a project has."""
    return conn.execute(sa.select(usage.c.bytes).where(usage.c.project_id == _project_of(project_id))).scalar() or 0


def count(conn: sa.Connection, project_id: str | None) -> int:
    """Return how many images a project has."""
    return conn.execute(sa.select(sa.func.count()).where(images.c.owner == (project_id or None))).scalar_one()


_SIZE = sa.bindparam("size", type_=sa.BigInteger)
_CHARGE = usage.update().where(usage.c.project_id == sa.bindparam("project")).values(bytes=usage.c.bytes + _SIZE)
_CHARGE_ANY = Prepared(_CHARGE)
_CHARGE_WITHIN = Prepared(_CHARGE.where(usage.c.bytes + _SIZE <= sa.bindparam("most", type_=sa.BigInteger)))


def _charge(conn: sa.Connection, project_id: str | None, size: int, max_bytes: int | None) -> None:
    charge = _CHARGE_ANY if max_bytes is None else _CHARGE_WITHIN
    values = {"project": _project_of(project_id), "size": size, "most": max_bytes}
    if charge.run(conn, values):
        return
    # There is no room, or this is the first image of the project.
    insert_if_absent(conn, usage, {"project_id": values["project"], "bytes": 0})
    if not charge.run(conn, values):
        raise _no_room(max_bytes, size)


def _no_room(max_bytes: int | None, size: int) -> TooLarge:
    return TooLarge(f"The project may keep {max_bytes} bytes of images: there is no room for {size} more.")


def _release(conn: sa.Connection, project_id: str | None, size: int) -> None:
    mine = usage.update().where(usage.c.project_id == _project_of(project_id))
    conn.execute(mine.values(bytes=usage.c.bytes - size))
