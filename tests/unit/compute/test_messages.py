"""What owners of servers read of hosts: the messages of errors that agents, drivers and the control plane make."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import micronova
from micronova.objects.errors import MicronovaError

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


CONTROL = ("api/compute", "clients", "conductor", "console", "db", "objects", "placement", "scheduler", "servers")
PLACES = re.compile(r"\b(hosts?|nodes?|hostname|host_ip|source|destination|claimed|chosen|other)\b|_(host|node)\b")
SEEN_BY_NO_MEMBER = {
    "api/compute/hosts.py": "only admins manage hosts",
    "api/compute/hypervisors.py": "only admins see hypervisors",
    "conductor/findings/claims.py": "the answer to an operator who repairs",
    "conductor/findings/guests.py": "the answer to an operator who repairs",
    "conductor/findings/misplaced_guests.py": "the answer to an operator who repairs",
    "conductor/host_users.py": "the answer to a message of a host",
    "db/aggregates.py": "only admins manage aggregates",
    "db/node_reports.py": "the answer to a host's report",
    "db/nodes.py": "the answer to an admin who manages services",
    "db/operation_repair.py": "the answer to an operator at the command line",
    "db/services.py": "the answer to a host's report, or to an admin who manages services",
}
NAMED_BY_CALLER = {
    "Compute host {host} could not be found.",
    "Compute host {host} not found.",
    "Compute host {node} could not be found.",
    "The target host can't be the same one: {host}.",
    "Cannot migrate instance {row['uuid']} to its current host {row['host']}.",
    'Host "{host}" is not in the availability zone "{pinned}".',
    # Only admins evacuate servers; the text is Nova's.
    "Compute service of {host} is still in use.",
    "Compute service of {host} was just stopped and may return",
    # No hosts.
    "hw:pci_numa_affinity_policy is {chosen!r}",
    "a device of source_type {source} needs a uuid",
    "a device has source_type {source[:32]!r}",
    "a device of source_type {source} has no {source}_id",
}
"""Parts of messages whose host the caller has named, or that are about no host."""
LATER = {"Unavailable", "HostUnavailable"}
"""Errors of operations that are logged, and tried again."""


def _error_classes(above: type[Exception] = MicronovaError) -> Iterator[str]:
    yield above.__name__
    for each in above.__subclasses__():
        yield from _error_classes(each)


def test_no_error_that_a_member_can_meet_names_a_host() -> None:
    """Whoever raises, returns or passes it on: a refusal of a request, or a failure that becomes the server's fault."""
    errors, found = set(_error_classes()), []
    for package in CONTROL:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name in SEEN_BY_NO_MEMBER:
                continue
            for call in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in errors):
                    continue
                if call.func.id in LATER and name.startswith("conductor/operations/"):
                    continue
                for message in call.args[:1]:
                    parts = [each.value for each in ast.walk(message) if isinstance(each, ast.FormattedValue)]
                    text = ast.unparse(message).replace('\\"', '"')
                    if any(PLACES.search(ast.unparse(each)) for each in parts):
                        found += [(name, text)] if not any(known in text for known in NAMED_BY_CALLER) else []
    assert found == []
