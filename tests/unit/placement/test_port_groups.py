"""What serves ports after the allocations of their server were replaced through the Placement API."""

import pytest

from micronova.objects.port_resources import ServedGroup, ServedPort
from micronova.placement.port_groups import followed

UP, DOWN = "NET_BW_EGR_KILOBIT_PER_SEC", "NET_BW_IGR_KILOBIT_PER_SEC"


def _port(id: str, provider: str, **amounts: int) -> ServedPort:
    resources = {{"up": UP, "down": DOWN}[name]: amount for name, amount in amounts.items()}
    return ServedPort(port_id=id, groups=(ServedGroup(id=f"g-{id}", provider=provider, resources=resources),))


def _held(**amounts: int) -> dict[tuple[str, str], int]:
    """Read a_up as what is held of the class UP of the provider a."""
    split = {tuple(name.split("_")): amount for name, amount in amounts.items()}
    return {(provider, {"up": UP, "down": DOWN}[name]): amount for (provider, name), amount in split.items()}


BOTH = (_port("p", "a", up=600, down=100), _port("q", "a", up=300, down=100))
ONE = (_port("p", "a", up=600),)


@pytest.mark.parametrize(
    ("ports", "before", "after", "found"),
    [
        pytest.param(
            BOTH,
            _held(a_up=900, a_down=200),
            _held(b_up=900, b_down=200),
            (_port("p", "b", up=600, down=100), _port("q", "b", up=300, down=100)),
            id="another provider",
        ),
        pytest.param(
            BOTH,
            _held(a_up=900, a_down=200),
            _held(a_up=600, a_down=100, b_up=300, b_down=100),
            (BOTH[0], _port("q", "b", up=300, down=100)),
            id="the second only",
        ),
        pytest.param(
            BOTH,
            _held(a_up=900, a_down=200),
            _held(a_up=300, a_down=100, b_up=600, b_down=100),
            (_port("p", "b", up=600, down=100), BOTH[1]),
            id="the first only",
        ),
        pytest.param(
            BOTH,
            _held(a_up=900, a_down=200),
            _held(b_up=300, b_down=100, c_up=600, c_down=100),
            (_port("p", "c", up=600, down=100), _port("q", "b", up=300, down=100)),
            id="apart",
        ),
        pytest.param(
            ONE, _held(a_up=700), _held(b_up=700), (_port("p", "b", up=600),), id="with what the flavor asks for"
        ),
        pytest.param(
            ONE,
            _held(a_up=1200),
            _held(a_up=600, b_up=600),
            ONE,
            id="perhaps what the flavor asks for, and not the port",
        ),
        pytest.param(ONE, _held(a_up=600, b_up=600), _held(b_up=600), ONE, id="to nowhere: b had that before"),
        pytest.param(
            (_port("p", "a", up=600, down=100),),
            _held(a_up=600, a_down=100),
            _held(b_up=600, c_down=100),
            (_port("p", "a", up=600, down=100),),
            id="a group is never served by two",
        ),
        pytest.param(ONE, _held(a_up=600), _held(a_up=1000), (_port("p", "a", up=1000),), id="more"),
        pytest.param(ONE, _held(a_up=700), _held(a_up=500), (_port("p", "a", up=400),), id="less, besides the flavor"),
        pytest.param(BOTH, _held(a_up=900, a_down=200), _held(a_up=1000, a_down=200), BOTH, id="more of one of two"),
        pytest.param(ONE, _held(a_up=600), {}, ONE, id="removed"),
        pytest.param(ONE, {}, _held(a_up=600), ONE, id="restored"),
        pytest.param(ONE, {}, _held(b_up=600), (_port("p", "b", up=600),), id="restored elsewhere"),
        pytest.param(ONE, {}, _held(a_up=700), ONE, id="restored with what the flavor asks for"),
        pytest.param((), _held(a_up=600), _held(b_up=600), (), id="without ports"),
    ],
)
def test_the_record_of_ports_follows(
    ports: tuple[ServedPort, ...],
    before: dict[tuple[str, str], int],
    after: dict[tuple[str, str], int],
    found: tuple[ServedPort, ...],
) -> None:
    assert followed(ports, before, after) == found
