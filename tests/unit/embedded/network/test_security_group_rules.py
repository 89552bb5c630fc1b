from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from micronova.embedded.network.security_group_rules import PROTOCOLS, checked, fingerprint
from micronova.objects.errors import Invalid

RULES = st.fixed_dictionaries(
    {},
    optional={
        "ethertype": st.sampled_from(["IPv4", "IPv6", "ipv6", None]),
        "protocol": st.one_of(st.none(), st.integers(-1, 300), st.sampled_from([*PROTOCOLS, "any", "", "x", "TCP"])),
        "port_range_min": st.one_of(st.none(), st.integers(-2, 70_000)),
        "port_range_max": st.one_of(st.none(), st.integers(-2, 70_000)),
        "remote_ip_prefix": st.sampled_from([None, "", "10.0.0.1", "10.0.0.9/8", "0.0.0.0/0", "::/0", "fd::1/9", "y"]),
    },
)


@given(RULES)
def test_a_rule_is_refused_or_one_that_a_firewall_can_have(given_: dict[str, Any]) -> None:
    try:
        rule = checked(given_)
    except Invalid as error:
        assert error.details["type"] != "Invalid"
        return
    assert rule["ethertype"] in ("IPv4", "IPv6")
    number = None if rule["protocol"] is None else int(PROTOCOLS.get(rule["protocol"], rule["protocol"]))
    assert number is None or 0 <= number <= 255
    low, high = rule["port_range_min"], rule["port_range_max"]
    if number in (1, 58):
        assert all(value is None or 0 <= value <= 255 for value in (low, high))
    else:
        assert (low is None) == (high is None)
        assert low is None or high is None or (number is not None and 1 <= low <= high <= 65535)
    # Checked again it is the same rule, with the same fingerprint.
    again = checked(rule)
    extra = {"direction": "ingress", "remote_group_id": None}
    assert again == rule
    assert fingerprint({**again, **extra}) == fingerprint({**rule, **extra})
    assert len(fingerprint({**rule, **extra, "remote_group_id": "x" * 36})) <= 200
