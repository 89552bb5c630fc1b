"""Images, members and tasks as the service reads them: statuses, and who may see them."""

from enum import Enum
from typing import Any, Literal, get_args

import msgspec

QUEUED = "queued"  # a record without data
SAVING = "saving"  # data is being uploaded
UPLOADING = "uploading"  # data is being staged, or is staged and waits for an import
ACTIVE = "active"
DEACTIVATED = "deactivated"

STATUSES = (
    QUEUED,
    SAVING,
    ACTIVE,
    "killed",
    "deleted",
    "pending_delete",
    DEACTIVATED,
    UPLOADING,
    "importing",
)
STORE = "file"  # the only place where data is kept
IMPORT_METHODS = ("glance-direct",)
VISIBILITIES = ("public", "community", "shared", "private")
MemberStatus = Literal["pending", "accepted", "rejected"]
MEMBER_STATUSES: tuple[str, ...] = get_args(MemberStatus)
TASK_STATUSES = ("pending", "processing", "success", "failure")
NewTaskType = Literal["import", "export", "clone"]
TASK_TYPES = (*get_args(NewTaskType), "api_image_import")
TASK_FILTER_TYPES = (*TASK_TYPES, "location_import")  # Glance's lists of tasks know it; no task of this service has it


class UploadState(Enum):
    """What the row of an image says about one upload of its data."""

    RUNNING = "running"
    ENDED = "ended"  # it was committed, or a sweep took it over
    IMAGE_DELETED = "image deleted"


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image with its tags and properties, read in one query."""

    id: str
    name: str | None
    status: str
    visibility: str
    owner: str | None
    disk_format: str | None
    container_format: str | None
    min_disk: int
    min_ram: int
    protected: bool
    os_hidden: bool
    created_at: int
    updated_at: int
    size: int | None = None
    virtual_size: int | None = None
    checksum: str | None = None
    os_hash_algo: str | None = None
    os_hash_value: str | None = None
    revision: int = 1
    upload_id: str | None = None
    tags: tuple[str, ...] = ()
    properties: dict[str, str | None] = {}
    shared_with_caller: bool = False  # the caller's project is a member, whatever the status of the membership

    @property
    def is_staged(self) -> bool:
        """Return whether the image has staged data that waits for an import."""
        return self.status == UPLOADING and self.upload_id is None

    @property
    def text_bytes(self) -> int:
        """Return how many bytes the tags and properties have, which users choose."""
        texts = (*self.tags, *self.properties, *self.properties.values())
        return sum(len(text.encode()) for text in texts if text)

    def target_for(self, project_id: str) -> dict[str, str | None]:
        """Return the policy target for a caller of this project."""
        return {
            "project_id": self.owner,
            "owner": self.owner,
            "visibility": self.visibility,
            "member_id": project_id if self.shared_with_caller else None,
        }

    def is_visible_to(self, project_id: str, is_admin: bool) -> bool:
        """Return whether a caller of this project may see the image, which was read for that project."""
        if is_admin or self.visibility in ("public", "community"):
            return True
        if project_id and self.owner == project_id:
            return True
        return self.visibility == "shared" and self.shared_with_caller


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A project that an image is shared with."""

    image_id: str
    member: str
    status: str
    created_at: int
    updated_at: int


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The record of an import."""

    id: str
    type: str
    status: str
    owner: str | None
    image_id: str | None
    user_id: str | None
    request_id: str | None
    input: dict[str, Any]
    result: dict[str, Any] | None
    message: str
    created_at: int
    updated_at: int
    expires_at: int


class DataSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The size and the digests of the data of an image."""

    size: int
    checksum: str  # MD5, for old clients
    os_hash_value: str
    os_hash_algo: str = "sha512"
    virtual_size: int | None = None
