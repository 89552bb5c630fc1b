"""Placement's own functional API tests (gabbi files), unmodified, against our Placement API.

    python -m tests.placement_gabbi [--placement PYTHON] [--only REGEX]

PYTHON is that of an environment with Placement; without it, Placement is installed into a temporary one. Its fixtures
make the same things as always, but through our API (`placement_side.py`). The requests of its files go to our service,
which `server.py` makes anew for each file. A failure is listed; one that `known.py` explains is not counted as such.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.peers import peer
from tests.placement_gabbi.known import reason_for
from tests.placement_gabbi.server import serve
from tests.services.process import free_port

PLACEMENT = "16.0.0"
NEEDED_BY_TESTS = ("gabbi==4.2.3", "fixtures", "oslotest", "testtools", "wsgi-intercept", "setuptools")
SIDE = Path(__file__).with_name("placement_side.py")


async def run(python: str, only: str) -> list[dict[str, str]]:
    """Serve the API, run the tests, and return their results."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="mn-gabbi-") as folder:
        async with serve(Path(folder), port):
            tests = await asyncio.create_subprocess_exec(
                python, str(SIDE), str(port), only, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, limit=2**24
            )
            assert tests.stdout is not None
            results = [json.loads(line) async for line in tests.stdout]
            await tests.wait()
    return results


def main() -> int:
    """Run the tests; the exit code is 1 if one failed without a known reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placement", metavar="PYTHON", help="of an environment that has Placement and gabbi")
    parser.add_argument("--only", metavar="REGEX", default="", help="run only the files whose name matches")
    arguments = parser.parse_args()
    python = arguments.placement
    if python is None:
        python = str(peer("placement", f"openstack-placement=={PLACEMENT}", *NEEDED_BY_TESTS) / "bin" / "python")
    results = asyncio.run(run(python, arguments.only))
    failed = [each for each in results if each["status"] == "failed"]
    unknown = [each for each in failed if not reason_for(each["id"])]
    for each in failed:
        reason = reason_for(each["id"])
        print(f"{each['id']}\n    {'known: ' + reason if reason else each['details']}")
    print(
        f"{len(results)} tests of Placement {PLACEMENT}: {len(results) - len(failed)} passed, "
        f"{len(failed) - len(unknown)} differ for a known reason, {len(unknown)} failed"
    )
    return 1 if unknown or not results else 0


if __name__ == "__main__":
    sys.exit(main())
