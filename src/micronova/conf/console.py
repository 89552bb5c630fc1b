"""The sections of consoles: tokens, the links that the API gives out, and the proxy that serves them."""

from typing import Annotated

import msgspec
from msgspec import Meta


class ConsoleAuthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens of consoles."""

    token_ttl: Annotated[
        float, Meta(gt=0, description="Seconds that a console link is valid. Lower it if links may be seen by others.")
    ] = 600.0
    enforce_session_timeout: Annotated[
        bool,
        Meta(
            description="Whether an open console is closed when the link to it expires. Set it to true if consoles "
            "must not stay open."
        ),
    ] = False


class VNCSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Links to screens."""

    novncproxy_base_url: Annotated[
        str,
        Meta(
            description="URL of the page that VNC links lead to; empty: /console/vnc_lite.html at the address of "
            "the API. Set it if the console proxy has another address than the API.",
            examples=["https://console.example/console/vnc_lite.html"],
        ),
    ] = ""


class SpiceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Links to screens that are shown by SPICE."""

    html5proxy_base_url: Annotated[
        str,
        Meta(
            description="URL of the page that SPICE links lead to; empty: /console/spice_auto.html at the address "
            "of the API. Set it if the console proxy has another address than the API.",
            examples=["https://console.example/console/spice_auto.html"],
        ),
    ] = ""
    spice_direct_proxy_base_url: Annotated[
        str,
        Meta(
            description="URL of a SPICE proxy of your own, to which links of the type spice-direct lead. As an "
            "admin the proxy asks the API where the console of a token is. Empty: there are no such "
            "links. Set it if you run such a proxy.",
            examples=["https://spice.example/"],
        ),
    ] = ""


class SerialConsoleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Links to serial ports."""

    base_url: Annotated[
        str,
        Meta(
            description="URL of the page, or ws:// URL ending in /console/websockify, that serial links lead to; "
            "empty: /console/serial.html at the address of the API. Set it if the console proxy has "
            "another address than the API.",
            examples=["wss://console.example/console/websockify"],
        ),
    ] = ""


class ConsoleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The console proxy, and compute hosts that it does not run on."""

    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Web origins besides the proxy's own whose pages may show consoles. Set it if another web "
            "page, such as Horizon, embeds consoles.",
            examples=[["https://dashboard.example"]],
        ),
    ] = ()
    novnc_path: Annotated[
        str, Meta(description="Directory of noVNC (Debian: novnc). Change it if noVNC is elsewhere.")
    ] = "/usr/share/novnc"
    xterm_path: Annotated[
        str,
        Meta(description="Directory of the package xterm.js (Debian: node-xterm). Change it if xterm.js is elsewhere."),
    ] = "/usr/share/nodejs/xterm"
    spice_html5_path: Annotated[
        str, Meta(description="Directory of spice-html5 (Debian: spice-html5). Change it if spice-html5 is elsewhere.")
    ] = "/usr/share/spice-html5"
    relay_listen: Annotated[
        str,
        Meta(
            pattern=r"^(.+:\d{1,5})?$",
            description="ADDRESS:PORT at which a compute host serves console proxies on other machines; empty: "
            "none. Proxies connect to the address that `micronova host add NAME --console-address` "
            "registered. Set it on hosts whose consoles users should see.",
            examples=["192.0.2.17:6080"],
        ),
    ] = ""
    socket_path: Annotated[
        str,
        Meta(
            description="Directory below which the console proxy accepts Unix sockets of consoles; empty: "
            "state_path. Set it if guests run in the directory of another cloud.",
            examples=["/srv/micronova"],
        ),
    ] = ""
