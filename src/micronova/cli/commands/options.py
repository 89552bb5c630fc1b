"""Options that several commands have."""

from pathlib import Path
from typing import Any

import click


def directory_option(command: Any) -> Any:
    """Add --dir, which every command that works with a cloud takes."""
    return click.option(
        "--dir",
        "directory",
        # The person who typed sudo may pass through DIR, not list it.
        type=click.Path(path_type=Path, file_okay=False, readable=False),
        envvar="MICRONOVA_DIR",
        help="Directory of the cloud [default: $MICRONOVA_DIR, else /var/lib/micronova for root, "
        "else ~/.local/state/micronova].",
    )(command)


config_option = click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings (TOML).")
region_config_option = click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False), help="Settings of a cloud of many processes."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
