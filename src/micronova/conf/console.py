"""The sections of consoles: tokens, the links that the API gives out, and the proxy that serves them."""

from typing import Annotated

import msgspec
from msgspec import Meta


class ConsoleAuthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens of consoles."""

    token_ttl: Annotated[float, Meta(gt=0, description="Seconds that a console link is valid.")] = 600.0
    enforce_session_timeout: Annotated[
        bool, Meta(description="Whether an open console is closed when its link expires.")
    ] = False


class VNCSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Links to screens."""

    novncproxy_base_url: Annotated[
        str,
        Meta(
            description="URL of the page that VNC links lead to; empty: /console/vnc_lite.html at the address of "
            "the API."
        ),
    ] = ""


class SpiceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Links to screens that are shown by SPICE."""

    html5proxy_base_url: Annotated[
        str,
        Meta(
            description="URL of the page that SPICE links lead to; empty: /console/spice_auto.html at the address "
            "of the API."
        ),
    ] = ""
    spice_direct_proxy_base_url: Annotated[
        str,
        Meta(
            description="URL of a SPICE proxy of your own, to which links of the type spice-direct lead. As an "
            "admin it asks the API where the console of a token is. Empty: there are no such links."
        ),
    ] = ""


class SerialConsoleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Links to serial ports."""

    base_url: Annotated[
        str,
        Meta(
            description="URL of the page, or ws:// URL ending in /console/websockify, that serial links lead to; "
            "empty: /console/serial.html at the address of the API."
        ),
    ] = ""


class ConsoleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The console proxy, and compute hosts that it does not run on."""

    allowed_origins: Annotated[
        tuple[str, ...], Meta(description="Web origins besides the proxy's own whose pages may show consoles.")
    ] = ()
    novnc_path: Annotated[str, Meta(description="Directory of noVNC (Debian: novnc).")] = "/usr/share/novnc"
    xterm_path: Annotated[str, Meta(description="Directory of the package xterm.js (Debian: node-xterm).")] = (
        "/usr/share/nodejs/xterm"
    )
    spice_html5_path: Annotated[str, Meta(description="Directory of spice-html5 (Debian: spice-html5).")] = (
        "/usr/share/spice-html5"
    )
    relay_listen: Annotated[
        str,
        Meta(
            pattern=r"^(.+:\d{1,5})?$",
            description=(
                "ADDRESS:PORT at which a compute host serves console proxies on other machines; empty: none. "
                "Proxies connect to the address that `micronova host add NAME --console-address` registered."
            ),
        ),
    ] = ""
    socket_path: Annotated[
        str,
        Meta(
            description="Directory below which the console proxy accepts Unix sockets of consoles; empty: state_path."
        ),
    ] = ""
