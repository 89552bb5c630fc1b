"""`python -m tests.services up --dir DIR`: one PostgreSQL and one RabbitMQ until SIGTERM or Ctrl-C.

DIR/urls.json names both. Point MICRONOVA_TEST_SERVICES at that file and the tests use them instead of
starting their own, which saves some seconds per run while developing.
"""

import argparse
import contextlib
import json
import shutil
import signal
import tempfile
from pathlib import Path

from tests.services.postgres import Postgres
from tests.services.rabbitmq import RabbitMQ


def main() -> None:
    """Run the pair."""
    parser = argparse.ArgumentParser(prog="python -m tests.services", description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["up"])
    parser.add_argument("--dir", type=Path, help="where to keep it all (emptied first; default: a new one)")
    parser.add_argument("--durable", action="store_true", help="PostgreSQL with fsync, as in production")
    arguments = parser.parse_args()
    directory = arguments.dir or Path(tempfile.mkdtemp(prefix="micronova-services-"))
    for name in ("postgres", "rabbitmq"):
        shutil.rmtree(directory / name, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)  # the user postgres has to get through

    # An exception, and not a blocked signal: the children would inherit the block, and not hear when they are to end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    postgres = Postgres.start(directory / "postgres", durable=arguments.durable)
    try:
        rabbitmq = RabbitMQ.start(directory / "rabbitmq")
        try:
            urls = {"postgres": postgres.url, "rabbitmq": rabbitmq.url}
            (directory / "urls.json").write_text(json.dumps(urls, indent=2) + "\n")
            print(json.dumps({**urls, "file": str(directory / "urls.json")}, indent=2), flush=True)
            signal.pause()
        finally:
            rabbitmq.stop()
    finally:
        (directory / "urls.json").unlink(missing_ok=True)
        postgres.stop()


with contextlib.suppress(KeyboardInterrupt):
    main()
