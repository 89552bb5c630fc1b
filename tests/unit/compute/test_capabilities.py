"""What handlers say if the driver of their host lacks a capability."""

import re
from pathlib import Path
from typing import Any, cast

import pytest

from micronova.compute import handlers
from micronova.compute.handlers.shared import CANNOT, capable
from micronova.objects.errors import NotSupported
from micronova.virt.driver import Pause

ASKED = {
    name
    for path in Path(handlers.__file__).parent.glob("*.py")
    for name in re.findall(r"\bcapable\(host, (\w+)\)", path.read_text())
}


class Host:
    """A host whose driver can do nothing."""

    name, driver = "h1", None


def test_each_capability_that_handlers_ask_for_has_words() -> None:
    assert {capability.__name__ for capability in CANNOT} == ASKED


def test_a_driver_that_lacks_it_is_refused() -> None:
    with pytest.raises(NotSupported, match="The server's host cannot pause guests"):
        capable(cast(Any, Host()), Pause)
