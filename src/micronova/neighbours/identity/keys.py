"""The signing key of tokens, kept in a file that only its owner can read."""

import os
from pathlib import Path

from micronova.http.tokens import TokenSigner
from micronova.objects.errors import MicronovaError

NAME = "identity-token.key"


def load_or_make(directory: Path) -> bytes:
    """Return the key in the directory; make one, once, when there is none. Processes that share it get the same."""
    path = directory / NAME
    if not path.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = directory / f".{NAME}.{os.getpid()}"
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(TokenSigner.generate())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(fresh, path)  # fails when another process was faster, unlike a rename
            except FileExistsError:
                pass
        finally:
            fresh.unlink()
    key = path.read_bytes()
    if len(key) != 32:
        raise MicronovaError(
            f"{path} is not a signing key: remove it to have a new one made; all tokens are then void."
        )
    return key
