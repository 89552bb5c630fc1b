"""Checks of the broker: reachable, a login, rights, queues, room for messages.

Rights are tried on queues of names that no process uses. They belong to one connection, and the broker deletes them
with it. Queues that exist are declared again as they should be, which changes nothing.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from pamqp import commands

from micronova.cli.checks.own_settings import is_host
from micronova.cli.checks.shape import CONTROL_ROLES, HOST_ROLES, Check, Finding, NotAsked, Subject
from micronova.compute.rpcapi import COMPUTE_INTERFACE
from micronova.conductor.rpcapi import CONSOLE, HOSTS, KEYS, TASKS
from micronova.objects.clock import SystemClock
from micronova.rpc.amqp.bus import PROBE_KEY
from micronova.rpc.amqp.channel import ChannelClosed, Refused
from micronova.rpc.amqp.connection import Connection
from micronova.rpc.amqp.permissions import for_host
from micronova.rpc.amqp.session import (
    ACCESS_REFUSED,
    DEAD_EXCHANGE,
    DEAD_QUEUE,
    NOT_FOUND,
    PREFIX,
    REPLY_PREFIX,
    WORK_QUEUE_ARGUMENTS,
)
from micronova.rpc.amqp.url import BrokerUrl, parse
from micronova.rpc.contract import queue_name
from micronova.rpc.errors import BadBusUrl, ConnectionLost, WrongSettings
from micronova.scheduler.rpcapi import SCHEDULER_INTERFACE

SETTING = "default.transport_url"
RIGHT = "amqp://USER:PASSWORD@HOST[,HOST…]/VHOST of a RabbitMQ that runs and knows this user"
ROLES = (*CONTROL_ROLES, *HOST_ROLES)
OLDEST = (3, 10)
PROBE_SECONDS = 2.0
MISMATCH = 406
SHARED_QUEUES = tuple(
    PREFIX + queue_name(each.topic, each.namespace) for each in (TASKS, HOSTS, CONSOLE, KEYS, SCHEDULER_INTERFACE)
)


def checks(subject: Subject) -> Iterator[Check]:
    """Return the checks of the broker, if the settings name one."""
    if not subject.on_bus or not subject.among(ROLES):
        return
    yield Check("broker", ROLES, _reachable, SETTING, RIGHT)
    yield Check("rights at the broker", ROLES, _rights, SETTING, RIGHT)
    yield Check("room at the broker", ROLES, _room, SETTING, RIGHT)
    yield Check("queues", ROLES, _queues, SETTING, RIGHT)


async def _reachable(subject: Subject) -> list[Finding]:
    """Log in to every broker that the URL names. Processes go on with one of several."""
    url = _url(subject)
    found: list[Finding] = []
    away: list[Finding] = []
    answered = False
    for host in url.hosts:
        try:
            connection = await Connection.open(url, host, name="micronova check", clock=SystemClock())
        except ConnectionLost as error:
            right = f"{RIGHT}; `rabbitmqctl add_user`, `add_vhost` and `set_permissions` make it known"
            wrong = found if isinstance(error, WrongSettings) else away
            wrong.append(Finding(SETTING, f"{host[0]}:{host[1]} as {url.user}: {error}", right))
            continue
        answered = True
        version = connection.server_version
        if version and version < OLDEST:
            text = ".".join(map(str, version))
            found.append(Finding(SETTING, f"RabbitMQ at {host[0]}:{host[1]} is {text}", "3.10 or newer"))
        await connection.close()
    if answered:
        away = [msgspec.structs.replace(each, outcome="unknown") for each in away]
    return away + found


async def _rights(subject: Subject) -> list[Finding]:
    """Do what the roles do at their start, with queues that nobody else uses."""
    url = _url(subject)
    token = secrets.token_hex(4)
    own = [f"{REPLY_PREFIX}{url.user}.check{token}"]
    if is_host(subject):
        host = subject.process.host
        own.append(PREFIX + queue_name(COMPUTE_INTERFACE.topic, f"check_{token}", host))
        allowed = for_host(url.user, host)
        patterns = " ".join(f"'{each}'" for each in (allowed.configure, allowed.write, allowed.read))
    else:
        own += [PREFIX + queue_name(each.topic, f"check_{token}") for each in (TASKS, SCHEDULER_INTERFACE)]
        own.append(PREFIX + queue_name(COMPUTE_INTERFACE.topic, f"check_{token}", subject.process.host))
        patterns = "'.*' '.*' '.*'"
    right = f"rabbitmqctl set_permissions -p '{url.vhost}' {url.user} {patterns}"
    refused = {}
    async with _connected(url) as connection:
        for queue in own:
            try:
                channel = await connection.channel()
                arguments: dict[str, Any] = {"x-dead-letter-exchange": DEAD_EXCHANGE}
                await channel.request(
                    commands.Queue.Declare(queue=queue, exclusive=True, auto_delete=True, arguments=arguments)
                )
                await channel.consume(queue, lambda _: None, no_ack=True)
            except ChannelClosed as error:
                refused[_without_token(str(error), token)] = error.code
        try:
            confirmation = await _publish(connection)
            if confirmation.done():
                confirmation.result()
        except ChannelClosed as error:
            refused[str(error)] = error.code
        except Refused:
            pass  # that of room says more
    return [Finding(SETTING, text, right) for text in refused]


async def _publish(connection: Connection) -> asyncio.Future[None]:
    """Publish a message that no queue gets; return its confirmation, which may not have come after a moment."""
    channel = await connection.channel()
    await channel.confirm()
    confirmation = channel.publish("", PROBE_KEY, b"")
    assert confirmation is not None
    await asyncio.wait([confirmation], timeout=PROBE_SECONDS)
    return confirmation


def _without_token(text: str, token: str) -> str:
    return text.replace(f":check_{token}", "").replace(f".check{token}", "")


async def _room(subject: Subject) -> list[Finding]:
    """Publish a message that no queue gets: only publishers learn that the broker takes no messages."""
    async with _connected(_url(subject)) as connection:
        try:
            confirmation = await _publish(connection)
        except ChannelClosed:
            raise NotAsked("the user may not publish, as said above") from None
        if connection.blocked_since is not None:
            found = f"the broker accepts no messages ({connection.blocked_reason})"
            return [Finding(SETTING, found, "free memory and disk space at the broker")]
        if not confirmation.done():
            found = f"the broker did not confirm a message within {PROBE_SECONDS:g} s"
            return [Finding(SETTING, found, "a broker that has memory, disk space and most of its cluster's nodes")]
        confirmation.exception()
    return []


async def _queues(subject: Subject) -> list[Finding]:
    """Look at the queues that exist: whether they are those of Micronova, and whether they have dead letters."""
    url = _url(subject)
    host = is_host(subject)
    queues = [*(() if host else SHARED_QUEUES)]
    if subject.among(("compute",)):
        queues.append(PREFIX + queue_name(COMPUTE_INTERFACE.topic, COMPUTE_INTERFACE.namespace, subject.process.host))
    found = []
    async with _connected(url) as connection:
        for queue in queues:
            try:
                channel = await connection.channel()
                await channel.request(commands.Queue.Declare(queue=queue, passive=True))
                await channel.request(commands.Queue.Declare(queue=queue, durable=True, arguments=WORK_QUEUE_ARGUMENTS))
            except ChannelClosed as error:
                if error.code == MISMATCH:
                    right = (
                        f"a quorum queue as roles declare it: stop the roles, then `rabbitmqctl delete_queue {queue}`"
                    )
                    found.append(Finding(SETTING, f"the queue {queue} is of another kind: {error}", right))
                elif error.code not in (NOT_FOUND, ACCESS_REFUSED):
                    found.append(Finding(SETTING, f"the queue {queue} cannot be used: {error}", RIGHT))
        if host:
            found += await _declared_by_others(connection)
        else:
            found += await _dead_letters(connection)
    return found


async def _declared_by_others(connection: Connection) -> list[Finding]:
    """Return whether the queue that hosts send to is there: a host may not declare it."""
    queue = PREFIX + queue_name(HOSTS.topic, HOSTS.namespace)
    try:
        channel = await connection.channel()
        answer = await channel.request(commands.Queue.Declare(queue=queue, passive=True))
    except ChannelClosed as error:
        if error.code != NOT_FOUND:
            return []
        return [
            Finding(SETTING, f"there is no queue {queue} in this vhost", "start a conductor there, or correct VHOST")
        ]
    if not answer.consumer_count:
        return [Finding("", f"no conductor takes messages from {queue}", "a conductor that runs", "unknown")]
    return []


async def _dead_letters(connection: Connection) -> list[Finding]:
    try:
        channel = await connection.channel()
        answer = await channel.request(commands.Queue.Declare(queue=DEAD_QUEUE, passive=True))
    except ChannelClosed:
        return []  # the first control process that starts makes it
    if not answer.message_count:
        return []
    found = f"{answer.message_count} dead letters are in {DEAD_QUEUE}: messages that no process could handle"
    right = f"none: look for their cause in the logs, then `rabbitmqctl purge_queue {DEAD_QUEUE}`"
    return [Finding("", found, right, "unknown")]


def _url(subject: Subject) -> BrokerUrl:
    try:
        return parse(subject.settings.default.transport_url)
    except BadBusUrl:
        raise NotAsked("the URL of the broker is not valid, as said above") from None


@asynccontextmanager
async def _connected(url: BrokerUrl) -> AsyncIterator[Connection]:
    """Connect to the first broker that can be used; raise NotAsked if none can."""
    for host in url.hosts:
        try:
            connection = await Connection.open(url, host, name="micronova check", clock=SystemClock())
        except ConnectionLost:
            continue
        try:
            yield connection
        except ConnectionLost as error:
            raise NotAsked(f"the connection was lost: {error}") from None
        finally:
            await connection.close()
        return
    raise NotAsked("the broker cannot be asked, as said above")
