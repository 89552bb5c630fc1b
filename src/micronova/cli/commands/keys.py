"""Commands about the keys that sign tokens and encrypt secrets.

Each command imports its module when it runs, so that `micronova --help` stays fast.
"""

from pathlib import Path

import click

from micronova.cli.commands.options import config_option, directory_option, json_option


@click.group("token-key")
def token_key() -> None:
    """Maintain the keys that sign tokens."""


@token_key.command("rotate", short_help="Make a new key for tokens.")
@directory_option
@config_option
@click.option(
    "--after",
    type=click.IntRange(60),
    default=120,
    show_default=True,
    help="Seconds until the new key signs. All processes of the identity service must have the new keys.json by then.",
)
def token_key_rotate(directory: Path | None, config: Path | None, after: int) -> None:
    """Make a new key for tokens. Tokens of the old one stay valid until they expire."""
    from micronova.cli.maintain import rotate_token_key

    rotate_token_key(directory, config, after)


@token_key.command("show", short_help="Print the public keys that verify tokens.")
@directory_option
def token_key_show(directory: Path | None) -> None:
    """Print the public keys that verify tokens, for identity.public_key of other processes."""
    from micronova.cli.maintain import show_token_keys

    show_token_keys(directory)


@click.group("key")
def key() -> None:
    """Maintain the key of stored secrets."""


@key.command("rotate", short_help="Encrypt stored secrets with a new key.")
@directory_option
@config_option
@json_option
def key_rotate(directory: Path | None, config: Path | None, as_json: bool) -> None:
    """Encrypt stored secrets with default.secret_key: those of waiting operations, and the credentials of users.

    Those that default.other_secret_keys have encrypted are read with these. In a cloud of `micronova up`, which has to
    be stopped, a new key is made first, and the old one is forgotten in the end.
    """
    from micronova.cli.keys import rotate

    rotate(directory, config, as_json)
