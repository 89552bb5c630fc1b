"""What the audit says about network agents."""

import pytest

from micronova.cli.audit import run_audit
from tests.functional.full_cloud import FullCloud, full_cloud

__all__ = ["full_cloud"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_audit_lists_what_a_network_agent_cannot_do(full_cloud: FullCloud) -> None:
    fault = "StartDnsmasq: dnsmasq is missing: install dnsmasq-base."
    for faults in ([], [fault], []):
        report = {"host": "fake-1", "started": True, "configurations": {"faults": faults}}
        await full_cloud.admin.do("POST", "/network/v2.0/agent-reports", report)
        found = [(each["kind"], each["subject"], each["message"]) for each in await run_audit(full_cloud.process)]
        assert found == [("network", "fake-1", each) for each in faults]
