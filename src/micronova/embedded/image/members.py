"""Members: the projects that an image is shared with, and whether they accept it."""

from functools import partial
from typing import Annotated, Any

import msgspec

from micronova.embedded.image import attributes, member_queries, views
from micronova.embedded.image.core import Core
from micronova.embedded.image.model import Image, Member, MemberStatus
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Forbidden, NotFound


class NewMember(msgspec.Struct):
    """The body of a new member."""

    member: Annotated[str, msgspec.Meta(min_length=1, max_length=attributes.MAX_NAME)]


class MemberChange(msgspec.Struct):
    """The body of a change of a member's status."""

    status: MemberStatus


class MemberHandlers:
    """The handlers of image members."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_, one = "/v2/images/{image_id}/members", "/v2/images/{image_id}/members/{member_id}"
        route = partial(Route, checks_policy=True)
        return [
            route(method="POST", path=all_, handler=self.add, policy="add_member", body=NewMember),
            route(method="GET", path=all_, handler=self.list, policy="get_members"),
            route(method="GET", path=one, handler=self.show, policy="get_member"),
            route(method="PUT", path=one, handler=self.set_status, policy="modify_member", body=MemberChange),
            route(method="DELETE", path=one, handler=self.remove, policy="delete_member", status=204),
        ]

    async def add(self, request: Request, image_id: str) -> dict[str, Any]:
        """Share an image with a project."""
        body: NewMember = request.body
        await self._load(request, image_id, "add_member")
        member = await self._core.database.write(member_queries.add, image_id, body.member, self._core.now())
        return views.member(member)

    async def list(self, request: Request, image_id: str) -> dict[str, Any]:
        """List the members: the owner sees all, a member only itself."""
        image = await self._load(request, image_id, "get_members")
        found = await self._core.database.read(member_queries.list_members, image_id)
        shown = [views.member(member) for member in found if self._may_see(request, image, member.member)]
        return {"members": shown, "schema": "/v2/schemas/members"}

    async def show(self, request: Request, image_id: str, member_id: str) -> dict[str, Any]:
        """Show a member."""
        image = await self._load(request, image_id, "get_member")
        if not self._may_see(request, image, member_id):
            raise self._not_found(image_id, member_id)
        return views.member(await self._get(image_id, member_id))

    async def set_status(self, request: Request, image_id: str, member_id: str) -> dict[str, Any]:
        """Accept or reject an image; only the member may do that, not the owner."""
        body: MemberChange = request.body
        image = await self._load(request, image_id, "get_member")
        if not self._may_see(request, image, member_id):
            raise self._not_found(image_id, member_id)
        await self._get(image_id, member_id)
        request.authorize({**image.target_for(request.context.project_id), "member_id": member_id})
        member = await self._core.database.write(
            member_queries.set_status, image_id, member_id, body.status, self._core.now()
        )
        if member is None:
            raise self._not_found(image_id, member_id)
        return views.member(member)

    async def remove(self, request: Request, image_id: str, member_id: str) -> None:
        """Stop sharing an image with a project."""
        await self._load(request, image_id, "delete_member")
        await self._get(image_id, member_id)
        await self._core.database.write(member_queries.remove, image_id, member_id)

    async def _load(self, request: Request, image_id: str, rule: str) -> Image:
        image = await self._core.load(request, image_id, rule)
        if image.visibility != "shared":
            raise Forbidden(f"Image {image_id} is {image.visibility}: only shared images have members.")
        return image

    async def _get(self, image_id: str, member_id: str) -> Member:
        found = await self._core.database.read(member_queries.get, image_id, member_id)
        if found is None:
            raise self._not_found(image_id, member_id)
        return found

    def _may_see(self, request: Request, image: Image, member_id: str) -> bool:
        # The policy target is this member, not the caller.
        return request.allows({**image.target_for(request.context.project_id), "member_id": member_id}, "get_member")

    @staticmethod
    def _not_found(image_id: str, member_id: str) -> NotFound:
        return NotFound(f"Image {image_id} is not shared with a project {member_id[:64]}.")
