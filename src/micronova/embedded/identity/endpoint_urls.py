"""URLs of endpoints, and the placeholders in them: `$(NAME)s` or `%(NAME)s`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from micronova.objects.errors import Invalid

# Scheme, host and port of this cloud as the client sees them: clients may reach the same cloud by different names.
PUBLIC_URL = "$(public_url)s"
PLACEHOLDERS = ("project_id", "public_url", "tenant_id", "user_id")
PATTERN = r"\A([$%]\(public_url\)s|[a-zA-Z0-9+.-]+:)\S*\Z"  # what a URL looks like

_PLACEHOLDER = re.compile(rf"[$%]\(({'|'.join(PLACEHOLDERS)})\)s")
_UNFILLED = re.compile(r"[$%]\([^)]*\)?s?")


@dataclass(frozen=True, slots=True)
class OwnURLs:
    """Where the services of this cloud are.

    `elsewhere` has the URLs of services in other processes, by the URL that the catalog has for them and by interface:
    the settings say where they are, and may say something else after each start.
    """

    public_url: str  # scheme, host and port of this process as the client sees them
    elsewhere: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def fill(self, url: str, interface: str, values: Mapping[str, str]) -> str:
        """Return the URL of an endpoint with what its placeholders stand for; `values` has others than public_url."""
        return fill(self.elsewhere.get((url, interface), url), {"public_url": self.public_url, **values})


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
