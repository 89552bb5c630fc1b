"""An image as the service knows it: its states, and who may know of it."""

import msgspec

QUEUED = "queued"  # a record without data
SAVING = "saving"  # data is being uploaded
UPLOADING = "uploading"  # data is being staged, or is staged: it becomes the image's by an import
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
VISIBILITIES = ("public", "community", "shared", "private")
MEMBER_STATUSES = ("pending", "accepted", "rejected")


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """One image, read in one query together with its tags and properties."""

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
    version: int = 1
    upload_id: str | None = None
    tags: tuple[str, ...] = ()
    properties: dict[str, str | None] = {}
    shared_with_caller: bool = False  # the caller's project is a member, whatever it said to the invitation

    @property
    def is_staged(self) -> bool:
        """Say whether data waits for an import."""
        return self.status == UPLOADING and self.upload_id is None

    def target_for(self, project_id: str) -> dict[str, str | None]:
        """Return what policy rules see of the image when somebody of this project asks."""
        return {
            "project_id": self.owner,
            "owner": self.owner,
            "visibility": self.visibility,
            "member_id": project_id if self.shared_with_caller else None,
        }

    def is_known_to(self, project_id: str, is_admin: bool) -> bool:
        """Say whether somebody of this project, for which it was read, may know that the image exists."""
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


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an image's data once it is there."""

    size: int
    checksum: str  # MD5, which old clients compare
    os_hash_value: str
    os_hash_algo: str = "sha512"
    virtual_size: int | None = None
