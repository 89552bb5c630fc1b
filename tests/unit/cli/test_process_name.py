"""Conductors and schedulers on one machine have names, and so rows among services, of their own."""

import logging
import signal
import subprocess
import sys
import uuid
from contextlib import ExitStack

import pytest

from micronova.cli.process_name import own_name
from micronova.conf.settings import Settings, load

HOLD = """
import sys
from micronova.cli.process_name import own_name
from micronova.conf.settings import load
settings = load(None, {}, default={"host": "node"}, database={"connection": sys.argv[1]})
with own_name(settings, ["conductor"]) as name:
    print(name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def database() -> str:
    return f"postgresql://micronova:secret@127.0.0.1/{uuid.uuid4().hex}"


def _settings(database: str, host: str = "node") -> Settings:
    return load(None, {}, default={"host": host}, database={"connection": database})


def test_the_second_one_has_another_name(database: str, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack, caplog.at_level(logging.WARNING):

        def named(*roles: str, host: str = "node") -> str:
            return stack.enter_context(own_name(_settings(database, host), roles))

        assert named("conductor", "api") == "node" and not caplog.messages
        assert named("scheduler") == "node"  # a row of its own anyway
        assert named("conductor") == "node-2" and "set default.host" in caplog.text
        assert named("scheduler", "conductor") == "node-3"  # free for both
        assert named("conductor", host="node-2") == "node-2-2"  # the name that another has chosen
        assert named("api") == named("api") == "node"  # workers share one
        renewed = database.replace("micronova:secret", "micronova_2:other")
        assert stack.enter_context(own_name(_settings(renewed), ["conductor"])) == "node-4"
        other = stack.enter_context(own_name(_settings(f"{database}2"), ["conductor"]))
        assert other == "node"  # of another region
    with own_name(_settings(database), ["conductor"]) as name:
        assert name == "node"


def test_workers_have_the_same_names_after_every_start(database: str, caplog: pytest.LogCaptureFixture) -> None:
    with own_name(_settings(database), ["conductor"], worker=1) as second:
        with own_name(_settings(database), ["conductor", "api"]) as first:
            assert (first, second) == ("node", "node-2")
        assert not caplog.messages
        with own_name(_settings(database), ["conductor"], worker=1) as other:
            assert other == "node-3" and "set default.host" in caplog.text
    with own_name(_settings(database), ["api"], worker=1) as name:
        assert name == "node"


def test_one_that_was_killed_gets_its_name_back(database: str) -> None:
    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", HOLD, database]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    first, second = start(), None
    try:
        assert first.stdout is not None and first.stdout.readline() == "node\n"
        with own_name(_settings(database), ["conductor"]) as name:
            assert name == "node-2"
        first.send_signal(signal.SIGKILL)
        first.wait()
        second = start()
        assert second.stdout is not None and second.stdout.readline() == "node\n"
    finally:
        for each in (first, second):
            if each is not None:
                each.kill()
                each.communicate()
