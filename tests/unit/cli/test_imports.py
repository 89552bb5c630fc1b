"""What a process need not have, it does not import: that costs memory and the time of its start."""

import subprocess
import sys

HOST = "micronova.cli.run micronova.cli.wiring micronova.cli.roles.compute micronova.rpc.amqp.bus"


def _imported(modules: str) -> set[str]:
    """Return the packages that a new process has after these imports."""
    text = f"import importlib, sys\nfor each in {modules.split()!r}: importlib.import_module(each)\nprint(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, text=True).stdout.split()
    return {name.partition(".")[0] for name in names} | set(names)


def test_a_policy_decision_imports_no_http_client() -> None:
    text = """
from micronova.objects.context import RequestContext
from micronova.policies.enforcer import Enforcer, Rule
import sys
context = RequestContext(request_id="req", project_id="p", roles=("member",))
assert Enforcer([Rule("r", "role:member")]).allows("r", context)
assert "requests" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", text], check=True)


def test_the_agent_of_a_host_has_no_database_and_no_http_server() -> None:
    found = _imported(HOST)
    assert "micronova.compute.agent" in found
    assert not found & {"sqlalchemy", "asyncpg", "falcon", "uvicorn", "numpy", "cryptography", "micronova.db"}
