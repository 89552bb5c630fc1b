"""Let pytest explain failed assertions in the suite that both transports share."""

import pytest

pytest.register_assert_rewrite("tests.unit.rpc.bus_suite")
