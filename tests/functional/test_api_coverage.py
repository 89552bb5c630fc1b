"""The committed page about API coverage is the one that the route declarations give."""

import pytest

from tests.api_coverage import ALWAYS_501, PAGE, compute_routes, key, nova_operations, page
from tests.functional import good_requests as good
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
    owner = await full_cloud.person("member")
    things = await good.make_things(full_cloud, owner)
    server = f"{good.C}/servers/{things['servers']}"

    async def stopped() -> bool | None:
        return (await owner.do("GET", server))["server"]["status"] == "SHUTOFF" or None

    await owner.do("POST", f"{server}/action", {"os-stop": None})
    await full_cloud.until(stopped, "the server to stop")  # only then shares can be attached
    routes = compute_routes(full_cloud.routes())
    for text in ALWAYS_501:
        method, path = text.split()
        [route] = routes[key(method, path, "")]
        compute = full_cloud.process.services["compute"]
        answer = await full_cloud.admin.request(
            method, good.path(compute, route, things), good.body(route, things), minor=good.newest(route)
        )
        assert answer.status == 501, (text, answer)
