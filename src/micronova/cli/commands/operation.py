"""Commands about durable work, and the quota usage that it is charged to.

Each command imports its module when it runs, so that `micronova --help` stays fast.
"""

from pathlib import Path
from typing import Any

import click

from micronova.cli.commands.options import config_option, directory_option, json_option


@click.group()
def operation() -> None:
    """Look at durable work, try it again, cancel it."""


@operation.command("list")
@click.option("--kind", default="", help="Only of this kind, such as build, delete or resize.")
@click.option("--server", default="", metavar="UUID", help="Only of this server.")
@click.option("--owner", default="", help="Only what this conductor or compute host has.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="How many at most.")
@json_option
@directory_option
@config_option
def operation_list(directory: Path | None, config: Path | None, **options: Any) -> None:
    """List the open operations, the oldest first, with who has them and when they are tried again."""
    from micronova.cli.operations import list_operations

    list_operations(directory, config, **options)


@operation.command("show")
@click.argument("id")
@json_option
@directory_option
@config_option
def operation_show(id: str, as_json: bool, directory: Path | None, config: Path | None) -> None:
    """Show one operation, open or ended."""
    from micronova.cli.operations import show_operation

    show_operation(id, directory, config, as_json)


@operation.command("retry")
@click.argument("id")
@directory_option
@config_option
def operation_retry(id: str, directory: Path | None, config: Path | None) -> None:
    """Try an operation again at once, instead of after its pause."""
    from micronova.cli.operations import retry_operation

    retry_operation(id, directory, config)


@operation.command("cancel", short_help="Let an operation fail.")
@click.argument("id")
@directory_option
@config_option
def operation_cancel(id: str, directory: Path | None, config: Path | None) -> None:
    """Let an operation fail: a conductor undoes it as if its deadline were over.

    Deletes, and what undoes something, cannot be cancelled: they are repeated until they succeed.
    """
    from micronova.cli.operations import cancel_operation

    cancel_operation(id, directory, config)


@click.group()
def quota() -> None:
    """Repair recorded quota usage."""


@quota.command("recount")
@click.option("--project", default="", metavar="ID", help="Only this project [default: all whose usage is wrong].")
@directory_option
@config_option
def quota_recount(project: str, directory: Path | None, config: Path | None) -> None:
    """Set recorded usage to what exists, and print what was wrong. The cloud may be in use meanwhile."""
    from micronova.cli.operations import recount_quota

    recount_quota(project, directory, config)
