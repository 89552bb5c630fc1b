"""The `micronova` command: the root of its commands, which are in `cli/commands/`."""

import errno
from typing import Any

import click

from micronova.cli.commands import cloud, db, host, keys, operation, region, server, tools
from micronova.objects.errors import MicronovaError

# Errors that another user, another path or more space solves.
_SOLVED_BY_THE_USER = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR, errno.EISDIR)


class ErrorsAsLines(click.Group):
    """A group that prints an error that a person can solve as one line and exits with 1, without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except MicronovaError as error:
            click.echo(f"micronova: {error.message}", err=True)
            ctx.exit(1)
        except OSError as error:
            if error.errno not in _SOLVED_BY_THE_USER or error.filename is None:
                raise
            denied = error.errno in (errno.EACCES, errno.EPERM)
            hint = "use sudo, or name another place" if denied else "name another place"
            click.echo(f"micronova: Cannot use {error.filename}: {error.strerror}; {hint}.", err=True)
            ctx.exit(1)


@click.group(cls=ErrorsAsLines, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="micronova")
def main() -> None:
    """OpenStack Compute, rebuilt: a cloud in one process, or a region on PostgreSQL and RabbitMQ."""


for _command in (
    cloud.up,
    cloud.down,
    cloud.status,
    cloud.run,
    cloud.check,
    cloud.audit,
    cloud.service,
    region.region,
    db.db,
    keys.token_key,
    keys.key,
    host.host,
    operation.operation,
    operation.quota,
    server.timeline,
    server.explain,
    server.connect,
    server.ssh,
    tools.config,
    tools.openapi,
    tools.fleet_simulate,
    tools.image,
    tools.policy,
):
    main.add_command(_command)


if __name__ == "__main__":
    main()
