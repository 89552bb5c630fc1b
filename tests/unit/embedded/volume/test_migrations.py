"""The migrations create the tables that the code declares."""

from pathlib import Path

import pytest

from micronova.embedded.volume.service import MIGRATIONS
from micronova.embedded.volume.tables import metadata
from tests.unit.embedded.schema import both_kinds, both_ways, check_tables


@both_ways
@both_kinds
async def test_both_ways_lead_to_the_same_tables(
    way: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    await check_tables(metadata, MIGRATIONS, way, kind, tmp_path, request)
