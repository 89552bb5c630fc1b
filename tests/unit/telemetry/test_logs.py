"""Log lines: for people or for programs, with the request that they belong to."""

import asyncio
import errno
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from micronova.conf.settings import SettingsError, load
from micronova.telemetry import logs
from micronova.telemetry.logs import (
    JSONLines,
    LogStream,
    TextLines,
    limited_log,
    request_id,
    server_id,
    set_levels,
)


@pytest.fixture
def working_on() -> Iterator[str]:
    token = request_id.set("req-7")
    yield "req-7"
    request_id.reset(token)


def record(message: str, *arguments: object, failed: bool = False) -> logging.LogRecord:
    problem = None
    if failed:
        try:
            raise ValueError("of tea")
        except ValueError:
            problem = sys.exc_info()
    return logging.LogRecord("micronova.rpc.base", logging.WARNING, __file__, 1, message, arguments, problem)


def test_a_line_for_people_ends_with_the_request(working_on: str) -> None:
    line = TextLines().format(record("%d cups", 3))
    assert line.endswith("WARNING rpc.base: 3 cups [req-7]")


def test_a_line_for_people_begins_with_its_date_and_ends_with_the_server(working_on: str) -> None:
    token = server_id.set("7d4d0f7c-4f0e-4f0b-9d53-6d2f2f7a9e11")
    try:
        logged = record("plugged")
        logged.created = 1_790_000_000.25
        line = TextLines().format(logged)
        assert line == (
            "2026-09-21T14:13:20.250Z WARNING rpc.base: plugged [req-7 7d4d0f7c-4f0e-4f0b-9d53-6d2f2f7a9e11]"
        )
        assert json.loads(JSONLines().format(logged))["server_id"] == "7d4d0f7c-4f0e-4f0b-9d53-6d2f2f7a9e11"
    finally:
        server_id.reset(token)


def test_a_line_that_names_the_request_does_not_name_it_twice(working_on: str) -> None:
    assert TextLines().format(record("failed [%s]", "req-7")).count("req-7") == 1


def test_a_line_of_no_request_names_none() -> None:
    assert TextLines().format(record("tick")).endswith("tick")
    assert json.loads(JSONLines().format(record("tick")))["request_id"] is None


def test_a_line_for_programs_is_one_object(working_on: str) -> None:
    text = JSONLines().format(record("first\nsecond", failed=True))
    assert "\n" not in text
    line = json.loads(text)
    assert (line["level"], line["logger"], line["message"]) == ("WARNING", "micronova.rpc.base", "first\nsecond")
    assert line["request_id"] == "req-7"
    assert "of tea" in line["exception"]


@pytest.mark.parametrize("forged", ["\n", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\x1b[2K\r", "\0"])
def test_nobody_writes_lines_of_their_own(forged: str) -> None:
    line = TextLines().format(record("the host says: %s", f"{forged}12:00:00.000 ERROR   cli.up: forged"))
    assert len(line.splitlines()) == 1 and line.isprintable() and line.endswith("forged")


def test_no_line_of_a_trace_looks_like_one_of_the_log() -> None:
    try:
        raise ValueError("wrong\n12:00:00.000 ERROR   cli.up: forged\r12:00:00.000 ERROR   cli.up: forged")
    except ValueError:
        failed = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    first, *trace = TextLines().format(failed).splitlines()
    assert first.endswith("failed") and len(trace) > 3
    assert all(line.startswith("    ") and line.isprintable() for line in trace)


@pytest.mark.parametrize("lines", [TextLines(), JSONLines()])
def test_a_line_has_a_limit(lines: logging.Formatter) -> None:
    line = lines.format(record("%s", "x" * 1_000_000))
    assert len(line) < 11_000 and "… (990000 characters more)" in line


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


@pytest.fixture
def root_logger(tmp_path: Path) -> Iterator[logging.Logger]:
    """It writes to a file that can only be appended to, as standard error is of a cloud of `up --detach`."""
    with (tmp_path / "micronova.log").open("a") as stream:
        logger, handler = logging.getLogger(), LogStream(stream)
        logger.addHandler(handler)
        yield logger
        logger.removeHandler(handler)


async def _until(probe: Callable[[], bool]) -> None:
    while not probe():
        await asyncio.sleep(0.01)  # another thread works: nobody tells us


async def test_the_log_of_a_detached_cloud_stays_below_a_size(tmp_path: Path, root_logger: logging.Logger) -> None:
    file = tmp_path / "micronova.log"
    with file.open("a") as of_another_process:
        async with limited_log(file, 10_000):
            for number in range(3000):
                root_logger.warning("line %s", number)
        of_another_process.write("the end\n")
    assert file.stat().st_size <= 10_000 + 257 * 12
    numbers = [int(line.removeprefix("line ")) for line in _lines(file)[:-1]]
    assert numbers[-1] == 2999 and _lines(file)[-1] == "the end"
    assert numbers == list(range(numbers[0], 3000)), "the first half is gone, and no line is cut"


async def test_lines_of_other_processes_are_limited_as_well(
    tmp_path: Path, root_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOOK_INTERVAL", 0.01)
    file = tmp_path / "micronova.log"
    with file.open("a") as of_another_process:
        async with limited_log(file, 10_000):
            of_another_process.write("x\n" * 10_000)
            of_another_process.flush()
            await _until(lambda: file.stat().st_size <= 10_000)


async def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path, root_logger: logging.Logger) -> None:
    async with limited_log(tmp_path / "other" / "micronova.log", 100):
        for number in range(1000):
            root_logger.warning("line %s", number)
    assert len(_lines(tmp_path / "micronova.log")) == 1000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file that it may not cut")
async def test_a_limit_that_cannot_be_kept_is_an_error_in_the_log(
    tmp_path: Path, root_logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "micronova.log"
    file.chmod(0o600)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o711)
    os.seteuid(65534)  # as an agent, whose standard error is the file of another user
    try:
        async with limited_log(file, 100):
            root_logger.warning("a line")
    finally:
        os.seteuid(0)
    [error] = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert "default.log_file_max_size" in error and "Permission denied" in error


async def test_a_cut_that_fails_is_said_once_until_one_succeeds(
    tmp_path: Path, root_logger: logging.Logger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_descriptor: int, _size: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # a file that chattr +a protects

    def errors() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]

    file = tmp_path / "micronova.log"
    monkeypatch.setattr(logs, "LOOK_INTERVAL", 0.01)
    async with limited_log(file, 1000):
        with monkeypatch.context() as patched:
            patched.setattr(os, "ftruncate", refused)
            for number in range(2000):
                root_logger.warning("line %s", number)
            assert len(errors()) == 1 and "Operation not permitted" in errors()[0]
        await _until(lambda: file.stat().st_size <= 1000)


@pytest.fixture
def levels() -> Iterator[None]:
    names = ("", "watched", "micronova.watched", "micronova.watched.part", "micronova.other")
    before = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.usefixtures("levels")
def test_single_modules_have_levels_of_their_own() -> None:
    first = load(None, {}, default={"log_level": "WARNING", "default_log_levels": ["watched=DEBUG"]})
    set_levels(first)
    assert logging.getLogger("micronova.watched.part").getEffectiveLevel() == logging.DEBUG
    assert logging.getLogger("micronova.other").getEffectiveLevel() == logging.WARNING
    set_levels(load(None, {}, default={"log_level": "ERROR"}), first)
    assert logging.getLogger("micronova.watched.part").getEffectiveLevel() == logging.ERROR


def test_a_level_that_does_not_exist_is_refused_with_what_is_right() -> None:
    with pytest.raises(SettingsError) as refused:
        load(None, {}, default={"default_log_levels": ["conductor=LOUD"]})
    assert "default.default_log_levels" in refused.value.message and "conductor=DEBUG" in refused.value.message


def test_a_file_is_opened_anew_after_a_rotation(tmp_path: Path) -> None:
    path, rotated = tmp_path / "api.log", tmp_path / "api.log.1"
    handler = LogStream(sys.stderr)
    handler.setFormatter(TextLines())
    handler.write_to(path)
    handler.emit(record("first"))
    path.rename(rotated)
    handler.emit(record("second"))
    handler.write_to(path)
    handler.emit(record("third"))
    assert [line.split()[-1] for line in _lines(rotated)] == ["first", "second"]
    assert [line.split()[-1] for line in _lines(path)] == ["third"]
    with pytest.raises(FileNotFoundError):
        handler.write_to(tmp_path / "missing" / "api.log")
    handler.emit(record("fourth"))
    assert _lines(path)[-1].endswith("fourth")
