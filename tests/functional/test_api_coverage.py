"""The committed page about API coverage is the one that the route declarations give."""

import pytest

from tests.api_coverage import ALWAYS_501, PAGE, nova_operations, page
from tests.functional.full_cloud import FullCloud, full_cloud

__all__ = ["full_cloud"]

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_page_is_up_to_date(full_cloud: FullCloud) -> None:
    assert PAGE.read_text() == page(full_cloud.routes()), "run: python -m tests.api_coverage"


async def test_the_facts_about_nova_are_whole() -> None:
    operations = nova_operations()
    texts = [each.text for each in operations]
    assert len(set(texts)) == len(texts) and set(ALWAYS_501) <= set(texts)
    assert sum(each.path == "/servers/{id}/action" for each in operations) == 41


async def test_what_is_said_to_answer_501_does(full_cloud: FullCloud) -> None:
    admin = full_cloud.admin
    made = await admin.do("POST", "/compute/v2.1/os-aggregates", {"aggregate": {"name": "coverage"}})
    ids = {"os-aggregates": str(made["aggregate"]["id"]), "os-hosts": "fake-1", "os-baremetal-nodes": "1"}
    for text in ALWAYS_501:
        method, path = text.split()
        minor = 81 if method == "POST" else 1
        answer = await admin.request(
            method, "/compute/v2.1" + path.replace("{id}", ids[path.split("/")[1]]), minor=minor
        )
        assert answer.status == 501, (text, answer.status)
