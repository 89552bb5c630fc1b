"""Log lines: for people or for programs, with the request that they belong to."""

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from micronova.telemetry.logs import JSONLines, TextLines, request_id


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
