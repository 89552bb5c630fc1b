"""The fault of a server as its owner and admins read it."""

from micronova.objects.errors import NoValidHost
from micronova.objects.explanation import Explanation, FilterStep
from micronova.objects.instance import fault_of


def test_the_details_of_a_refusal_are_words() -> None:
    steps = (
        FilterStep(name="RamFilter", removed=2, remaining=1, hosts=("a", "b")),
        FilterStep(name="DiskFilter", removed=1, remaining=0, hosts=("c",)),
    )
    reasons = Explanation(hosts=3, filters=steps).reasons()
    fault = fault_of(NoValidHost("No valid host was found.", hosts=3, reasons=reasons), 0)
    assert fault["details"].startswith(
        "hosts: 3; reasons: name RamFilter, removed 2, remaining 1, hosts a, b; name Disk"
    )
    assert not set("{}[]()'") & set(fault["details"])
