"""URLs of endpoints, and the placeholders in them: `$(NAME)s` or `%(NAME)s`."""

import re
from collections.abc import Mapping

from micronova.objects.errors import Invalid

# Scheme, host and port of this cloud as the client sees them: clients may reach the same cloud by different names.
PUBLIC_URL = "$(public_url)s"
PLACEHOLDERS = ("project_id", "public_url", "tenant_id", "user_id")
PATTERN = r"\A([$%]\(public_url\)s|[a-zA-Z0-9+.-]+:)\S*\Z"  # what a URL looks like

_PLACEHOLDER = re.compile(rf"[$%]\(({'|'.join(PLACEHOLDERS)})\)s")
_UNFILLED = re.compile(r"[$%]\([^)]*\)?s?")


def check(url: str) -> str:
    """Return the URL; raise Invalid if it has a placeholder that nothing fills in."""
    unfilled = set(_UNFILLED.findall(_PLACEHOLDER.sub("", url)))
    if unfilled:
        raise Invalid(
            f"Invalid input for field/attribute endpoint.url: nothing fills in {', '.join(sorted(unfilled))}; "
            f"there are {', '.join(f'$({name})s' for name in PLACEHOLDERS)}."
        )
    return url


def fill(url: str, values: Mapping[str, str]) -> str:
    """Return the URL with these values, by name, for its placeholders; the others stay."""
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), url)


def needs_project(url: str) -> bool:
    """Return whether the URL has a placeholder for a project."""
    return any(name in ("project_id", "tenant_id") for name in _PLACEHOLDER.findall(url))
