"""What network agents call: the desired state of a host, and reports.

`GET /v2.0/agent-states/HOST` returns the desired state of a host and its fingerprint. With `fingerprint` in the query
it waits until the state has another one, for at most `wait` seconds (`state_watch.py`). With `parts` it returns only
the parts that differ, if this process knows the state with that fingerprint. `POST /v2.0/agent-reports` is
an agent's heartbeat and says which ports are wired. Service users may use both; a host may use them for itself, with
its ticket.
"""

from typing import Annotated, Any, cast

import msgspec
import sqlalchemy as sa
from msgspec import Meta

from micronova.embedded.common.chunks import chunks
from micronova.embedded.common.compute_events import Event
from micronova.embedded.network import dhcp_ports
from micronova.embedded.network.agent.desired_state import state_of_parts
from micronova.embedded.network.agent_heartbeats import AgentHeartbeat, AgentHeartbeats, record_heartbeats
from micronova.embedded.network.binding import events_of
from micronova.embedded.network.core import Core
from micronova.embedded.network.host_changes import note
from micronova.embedded.network.row_types import PortChanges, PortRow, port_with
from micronova.embedded.network.state_watch import StateWatch
from micronova.embedded.network.tables import ports
from micronova.embedded.network.topics import host_topic
from micronova.embedded.network.trunk_ports import refresh_status
from micronova.http.request import Request, Response
from micronova.http.service import Route

MAX_WAIT = 60.0

HostName = Annotated[str, Meta(min_length=1, max_length=255)]


class StateQuery(msgspec.Struct, kw_only=True):
    """The fingerprint of the state that the agent has, and how long it waits for another."""

    fingerprint: Annotated[str, Meta(max_length=64)] = ""
    wait: Annotated[float, Meta(ge=0, le=MAX_WAIT)] = 0.0
    parts: bool = False  # agents before 0.2.0 take the whole state only


class Report(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An agent's report."""

    host: HostName
    started: bool = False  # the agent has just started
    configurations: dict[str, Any] = {}
    up: Annotated[list[Annotated[str, Meta(max_length=36)]], Meta(max_length=10_000)] = []
    down: Annotated[list[Annotated[str, Meta(max_length=36)]], Meta(max_length=10_000)] = []
    dhcp: bool = False  # ports of DHCP servers have to be brought up to date


class AgentCallHandlers:
    """The handlers of what network agents call."""

    def __init__(self, core: Core, watch: StateWatch) -> None:
        self.core = core
        self._watch = watch
        self.heartbeats = AgentHeartbeats(core)

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route(
                method="GET", path="/v2.0/agent-states/{id}", handler=self.state, policy="get_agent_state",
                query=StateQuery, checks_policy=True, for_hosts=True,
            ),
            Route(
                method="POST", path="/v2.0/agent-reports", handler=self.report, policy="report_agent", body=Report,
                checks_policy=True, for_hosts=True,
            ),
        ]  # fmt: skip

    async def state(self, request: Request, id: str) -> Response:
        """GET /v2.0/agent-states/{id}: the id is the host's name."""
        request.authorize_host(id)
        query: StateQuery = request.query
        found = await self._watch.state(id, query.fingerprint, query.wait, whole=not query.parts)
        if query.parts:
            return Response(body=found)
        shown: dict[str, Any] = {"fingerprint": found.fingerprint}
        if found.fingerprint != query.fingerprint:
            shown["state"] = state_of_parts({name: msgspec.json.decode(raw) for name, raw in found.parts.items()})
        return Response(body=shown)

    async def report(self, request: Request) -> dict[str, float]:
        """POST /v2.0/agent-reports; the answer has the seconds until the next one."""
        body: Report = request.body
        request.authorize_host(body.host)
        heartbeat = AgentHeartbeat(host=body.host, started=body.started, configurations=body.configurations)
        if body.up or body.down:  # a transaction of its own, which does not wait for other agents
            await self.core.write_with_events(_record_report, self.core, body, heartbeat)
        else:
            await self.heartbeats.record(heartbeat)
        if body.dhcp:
            await dhcp_ports.bring_up_to_date(self.core, body.host)
        return {"interval": self.core.heartbeat_interval}


def _record_report(
    conn: sa.Connection, core: Core, report: Report, heartbeat: AgentHeartbeat
) -> tuple[None, list[Event]]:
    """Record a heartbeat and set the status of a host's ports as reported; return the events for compute."""
    record_heartbeats(conn, core, [heartbeat])
    events: list[Event] = []
    changed = False
    for status, ids in (("DOWN", report.down), ("ACTIVE", report.up)):
        for part in chunks(sorted(set(ids))):
            p = ports.c
            chosen = sa.select(ports).where(p.id.in_(part), p.host == report.host, p.status != status)
            for row in conn.execute(chosen.with_for_update()).mappings().all():
                if status == "ACTIVE" and not row["admin_state_up"]:
                    continue
                after: PortChanges = {"status": status, "updated_at": core.now(), "revision": row["revision"] + 1}
                conn.execute(ports.update().where(p.id == row["id"]).values(**after))
                before = cast(PortRow, dict(row))
                events += events_of(core, before, port_with(before, after))
                changed = True
    if changed:
        refresh_status(conn, [*report.up, *report.down])
        note(conn, core.now(), [host_topic(report.host)])
    return None, events
