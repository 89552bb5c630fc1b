"""Commands about the databases.

Each command imports its module when it runs, so that `micronova --help` stays fast.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from micronova.cli.commands.options import config_option, directory_option, json_option


@click.group()
def db() -> None:
    """Maintain the databases."""


@db.command("upgrade")
@directory_option
@config_option
def db_upgrade(directory: Path | None, config: Path | None) -> None:
    """Bring every database of the cloud to this version's schema."""
    from micronova.cli.maintain import upgrade

    upgrade(directory, config)


@db.command("current", short_help="Show the revision of each database.")
@directory_option
@config_option
@json_option
def db_current(directory: Path | None, config: Path | None, as_json: bool) -> None:
    """Show the revision of each database, and the one that this release needs. Exit 0 only if they are the same."""
    from micronova.cli.maintain import show_revisions

    sys.exit(show_revisions(directory, config, as_json))


@db.command("purge", short_help="Delete old operations and records of deleted servers.")
@directory_option
@config_option
@click.option(
    "--before",
    required=True,
    type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S"]),
    help="Purge what was deleted or ended before this time (UTC).",
)
@click.option("--dry-run", is_flag=True, help="Only count.")
def db_purge(directory: Path | None, config: Path | None, before: datetime, dry_run: bool) -> None:
    """Delete finished operations, and the records of deleted servers with their actions, faults and usage.

    The cloud may run meanwhile. `conductor.keep_deleted` does the same periodically.
    """
    from micronova.cli.maintain import purge

    purge(directory, config, before.replace(tzinfo=UTC).timestamp(), dry_run)
