"""Change keys and passwords of a region under load: `python -m tests.rotation`.

docs/operate.md says how: two are valid at a time, and one process after the other is restarted. While clients create
servers with passwords, show and delete them, the secret key, the user of the broker and the role of the database are
changed. No request may fail, no server may end in ERROR, and the audit finds nothing. What was valid before is gone at
the end.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sqlalchemy.engine import make_url

from tests.services.postgres import OWNER, Postgres
from tests.services.rabbitmq import RabbitMQ
from tests.upgrade import LOAD_BEFORE, SETTLE, Clients, Region, upgrade

OLD, NEW = "5a" * 32, "6b" * 32
SECOND = "micronova_2"


def change(region: Region, *changes: tuple[str, str]) -> None:
    """Replace texts in the settings of the region."""
    text = region.config.read_text()
    for before, after in changes:
        assert before in text, before
        text = text.replace(before, after)
    region.config.write_text(text)


def run(directory: Path) -> None:
    """Do all of it; raise AssertionError if a request fails."""
    with contextlib.ExitStack() as stack:
        postgres = Postgres.start(directory / "postgres")
        stack.callback(postgres.stop)
        rabbitmq = RabbitMQ.start(directory / "rabbitmq")
        stack.callback(rabbitmq.stop)
        database = postgres.create_database("rotation")
        region = Region(directory / "cloud", database, rabbitmq.url)
        stack.callback(region.stop)
        user = str(make_url(rabbitmq.url).username)
        change(region, ("[default]\n", f'[default]\ncontrol_users = ["{user}"]\nother_secret_keys = ""\n'))
        region.start()
        region.use_api(region.start_api())
        region.wait_ready(hosts=2)
        with Clients(region) as clients:
            time.sleep(LOAD_BEFORE)
            print("both are valid", flush=True)
            bus = rabbitmq.add_user(SECOND, "second")
            postgres.sql(f"CREATE ROLE {SECOND} LOGIN PASSWORD 'second' IN ROLE {OWNER}")
            postgres.sql(f"ALTER ROLE {SECOND} SET role TO {OWNER}")
            change(
                region,
                ('other_secret_keys = ""', f'other_secret_keys = "{NEW}"'),
                (f'control_users = ["{user}"]', f'control_users = ["{user}", "{SECOND}"]'),
            )
            upgrade(region, sys.executable)
            print("the new ones are used", flush=True)
            second = make_url(database).set(username=SECOND, password="second").render_as_string(hide_password=False)
            change(
                region,
                (f'secret_key = "{OLD}"', f'secret_key = "{NEW}"'),
                (f'other_secret_keys = "{NEW}"', f'other_secret_keys = "{OLD}"'),
                (database, second),
                (rabbitmq.url, bus),
            )
            upgrade(region, sys.executable)
            print("the old ones are gone", flush=True)
            subprocess.run(
                [sys.executable, "-m", "micronova.cli.main", "key", "rotate", "--config", region.config,
                 "--dir", directory / "tool"], check=True,
            )  # fmt: skip
            change(
                region,
                (f'other_secret_keys = "{OLD}"', 'other_secret_keys = ""'),
                (f'control_users = ["{user}", "{SECOND}"]', f'control_users = ["{SECOND}"]'),
            )
            rabbitmq.ctl("delete_user", user)
            upgrade(region, sys.executable)
        assert not clients.failed, f"{len(clients.failed)} requests failed: {clients.failed[:10]}"
        users = set(postgres.sql("SELECT DISTINCT usename FROM pg_stat_activity WHERE datname = 'rotation'").split())
        assert users == {SECOND}, users
        deadline = time.monotonic() + SETTLE
        while (findings := region.audit()) and time.monotonic() < deadline:
            time.sleep(1.0)
        assert findings == [], findings
        print(f"{clients.requests} requests, none failed; {len(clients.kept)} servers are left, the audit is clean")


def main() -> None:
    """Run it in a new directory, and remove that if all is well."""
    directory = Path(tempfile.mkdtemp(prefix="micronova-rotation-"))
    directory.chmod(0o755)
    began = time.monotonic()
    try:
        run(directory)
    except AssertionError as error:
        sys.exit(f"{error}; its files are in {directory}")
    shutil.rmtree(directory, ignore_errors=True)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
