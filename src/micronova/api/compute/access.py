"""Finding the server that a request is about, and asking policy about it."""

from typing import Any

from micronova.db import instances
from micronova.db.engine import Database
from micronova.http.request import Request
from micronova.objects.errors import InstanceNotFound


async def server(database: Database, request: Request, id: str, *, deleted: bool = False) -> Any:
    """Return the server's row and authorise the request's rule on it; strangers are told that there is none."""
    project = None if request.allows("context_is_admin") else request.context.project_id
    row = await database.read(instances.get, id, project)
    if row is None and deleted:
        row = await database.read(instances.get_deleted, id)
        if row is not None and project is not None and row["project_id"] != project:
            row = None
    if row is None:
        raise InstanceNotFound(f"Instance {id[:64]} could not be found.")
    request.authorize({"project_id": row["project_id"], "user_id": row["user_id"]})
    return row
