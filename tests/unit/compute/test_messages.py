"""What owners of servers read of hosts: the messages of all errors that agents and drivers raise."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import micronova

ROOT = Path(micronova.__file__).parent
NAMES = re.compile(r"\b(host|node|hostname|nodename|address|host_ip|uri)\b|_host\b(?!\.settings)|host\.name")
FOR_ADMINS = {
    # Only admins ask for these.
    "compute/image_caching.py",
    # An order that has lost its operation is told to nobody.
    "compute/work.py",
    # They end the start of an agent.
    "virt/fake/setup.py",
    "virt/fake/topology.py",
    "virt/libvirt/daemon/existing.py",
    "virt/loader.py",
}
"""Files whose errors may name a host."""
ADMIN_QUESTIONS = ("does not know its uptime", "it does not fail on request")


def _messages(tree: ast.AST) -> Iterator[ast.JoinedStr]:
    """Yield the first arguments of raised errors that are made of parts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            message = node.exc.args[0]
            if isinstance(message, ast.JoinedStr):
                yield message


def test_no_error_of_a_host_has_its_name_in_the_message() -> None:
    """Names and figures of hosts, and other servers, belong into `details`, which only admins see."""
    found = []
    for package in ("compute", "virt"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for message in _messages(ast.parse(path.read_text())):
                text = ast.unparse(message)
                parts = [ast.unparse(each.value) for each in message.values if isinstance(each, ast.FormattedValue)]
                if any(map(NAMES.search, parts)) and not any(each in text for each in ADMIN_QUESTIONS):
                    found.append((name, text))
    assert [each for each in found if each[0] not in FOR_ADMINS] == []
