"""Commands that need no cloud, or only read its settings.

Each command imports its module when it runs, so that `micronova --help` stays fast.
"""

import math
from pathlib import Path
from typing import Any

import click

from micronova.cli.commands.options import config_option, directory_option


class _Number(click.FloatRange):
    """A number within a range; `nan`, which is in each, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return found


@click.command()
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Show the values of this file.")
@click.option("--secrets", is_flag=True, help="Show passwords and keys, too; without it they are hidden.")
def config(config: Path | None, secrets: bool) -> None:
    """List every setting with its value and meaning, as a settings file."""
    from micronova.cli.maintain import show_settings

    show_settings(config, secrets=secrets)


@click.command(short_help="Print the OpenAPI document of the compute API.")
@click.option("--microversion", default="latest", show_default=True, help="Microversion, such as 2.90.")
@config_option
def openapi(microversion: str, config: Path | None) -> None:
    """Print the OpenAPI 3.1 document of the compute API at a microversion.

    A running cloud serves it at /compute/v2.1/openapi.json.
    """
    from micronova.cli.openapi import openapi as run

    run(microversion, config)


@click.command("fleet-simulate", short_help="Try scheduler settings on a synthetic fleet.")
@click.option("--hosts", type=click.IntRange(1, 200_000), default=1_000, show_default=True, help="Hosts of the fleet.")
@click.option(
    "--fleet",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Kinds of hosts (TOML) [default: hosts of 16, 32 and 64 CPUs in three zones].",
)
@click.option("--requests", default="synthetic", show_default=True, metavar="FILE|synthetic", help="Trace of requests.")
@click.option("--count", type=click.IntRange(1, 10_000_000), help="Requests of a synthetic trace [default: 20 a host].")
@click.option(
    "--load",
    type=_Number(0, 100, min_open=True),
    help="Largest demand of a synthetic trace at one time, as a multiple of the fleet [default: 1].",
)
@click.option(
    "--days",
    type=_Number(0, 3650, min_open=True),
    help="Length of a synthetic trace [default: what --load needs].",
)
@click.option(
    "--seed", type=int, default=1, show_default=True, help="Number that the trace and random choices follow from."
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME[=SETTINGS]",
    help="Settings to try: spread, pack, NAME=OPTION=VALUE,... or NAME=FILE.toml; may be repeated [default: spread].",
)
@click.option(
    "--build-time",
    type=_Number(0, 86_400),
    default=30.0,
    show_default=True,
    help="Seconds that a host works on a new server.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("fleet-simulation"),
    show_default=True,
    help="Directory for the plots (SVG) and report.json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--write-trace",
    "trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Only write a synthetic trace to this file.",
)
def fleet_simulate(**options: Any) -> None:
    """Let the scheduler place the servers of a trace on a synthetic fleet, in virtual time.

    It reports utilisation, fragmentation, refusals and the time of decisions, for several policies side by side.
    No cloud is needed, and none is touched.
    """
    from micronova.cli.fleet_simulate import SimulationOptions
    from micronova.cli.fleet_simulate import fleet_simulate as run

    run(SimulationOptions(**options))


@click.group()
def image() -> None:
    """Make images."""


@image.command("build-test", short_help="Build a small Linux image that boots.")
@directory_option
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Only write the image to this file.")
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False, readable=False),
    help="Directory that keeps built images.",
)
@click.option("--name", default="micronova-test", show_default=True, help="The registered image's name.")
def image_build_test(directory: Path | None, output: Path | None, cache: Path | None, name: str) -> None:
    """Build a small Linux image from Debian packages, and register it with the cloud in DIR."""
    from micronova.cli.image import build_test

    build_test(output, cache, directory, name)


@click.group()
def policy() -> None:
    """Look at the policy rules."""


@policy.command("check", short_help="List the rules that a user would pass.")
@click.option("--role", "roles", multiple=True, help="Role of the user; may be repeated  [default: member, reader].")
@click.option("--rule", default="", help="Only rules whose name begins so.")
@click.option(
    "--file",
    "policy_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="policy.yaml with rules that differ from the defaults.",
)
def policy_check(roles: tuple[str, ...], rule: str, policy_file: Path | None) -> None:
    """List the compute rules that a user with these roles would pass, in its own project and in others."""
    from micronova.cli.maintain import check_policy

    check_policy(roles, rule, policy_file)
