"""Log lines: for people or for programs, with the request that they belong to."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from micronova.telemetry.logs import BoundedStream, JSONLines, TextLines, request_id


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


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def test_the_log_of_a_detached_cloud_stays_below_a_size(tmp_path: Path) -> None:
    file = tmp_path / "micronova.log"
    with file.open("a+") as stream, file.open("a+") as of_another_process:
        logger = logging.Logger("test")
        logger.addHandler(BoundedStream(stream, 10_000))
        for number in range(3000):
            logger.warning("line %s", number)
        of_another_process.write("the end\n")
    assert file.stat().st_size <= 10_000 + 257 * 12
    numbers = [int(line.removeprefix("line ")) for line in _lines(file)[:-1]]
    assert numbers[-1] == 2999 and _lines(file)[-1] == "the end"
    assert numbers == list(range(numbers[0], 3000)), "the first half is gone, and no line is cut"


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.log"
    with file.open("w") as stream:
        logger = logging.Logger("test")
        logger.addHandler(BoundedStream(stream, 100))
        for number in range(1000):
            logger.warning("line %s", number)
    assert len(_lines(file)) == 1000
