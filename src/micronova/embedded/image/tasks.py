"""Tasks: the imports that the service has carried out. Clients cannot create other tasks."""

from typing import Any

import msgspec

from micronova.embedded.common.query import last
from micronova.embedded.image import listing, task_queries, views
from micronova.embedded.image.core import Core
from micronova.embedded.image.model import TASK_FILTER_TYPES, TASK_STATUSES, NewTaskType
from micronova.http.request import Request
from micronova.http.service import Route
from micronova.objects.errors import Invalid, NotFound

SORT_KEYS = ("created_at", "updated_at", "id", "type", "status")


class NewTask(msgspec.Struct):
    """The body of a new task."""

    type: NewTaskType
    input: dict[str, Any] = {}


class TaskHandlers:
    """The handlers of tasks."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """Return the routes."""
        all_, one, rule = "/v2/tasks", "/v2/tasks/{task_id}", "tasks_api_access"
        return [
            Route(method="GET", path=all_, handler=self.list, policy=rule),
            Route(method="POST", path=all_, handler=self.create, policy=rule, body=NewTask, status=201),
            Route(method="GET", path=one, handler=self.show, policy=rule),
        ]

    async def list(self, request: Request) -> dict[str, Any]:
        """List the tasks of all projects."""
        request.authorize(rule="get_tasks")
        query = request.raw_query
        page = listing.read_page(query, SORT_KEYS, "type", "status")
        found = await self._core.database.read(
            task_queries.list_tasks,
            listing.choice("type", last(query, "type"), TASK_FILTER_TYPES),
            listing.choice("status", last(query, "status"), TASK_STATUSES),
            page,
            self._core.now(),
        )
        if found is None:
            raise Invalid("Invalid query parameter 'marker': there is no such task.")
        shown, more = found
        return {
            "tasks": [views.task(task) for task in shown],
            "schema": "/v2/schemas/tasks",
            **listing.links("/v2/tasks", query, shown[-1].id if shown and more else None),
        }

    async def show(self, request: Request, task_id: str) -> dict[str, Any]:
        """Show a task."""
        request.authorize(rule="get_task")
        task = await self._core.database.read(task_queries.get, task_id, self._core.now())
        if task is None:
            raise NotFound(f"There is no task {task_id[:64]}.")
        return views.task(task, details=True)

    async def create(self, request: Request) -> dict[str, Any]:
        """Refuse a new task: each type fetches data from another server, or sends data to one."""
        request.authorize(rule="add_task")
        body: NewTask = request.body
        raise Invalid(
            f"A task of type '{body.type}' moves data between servers, which this service does not do: "
            "upload the data of an image, or stage and import it."
        )
