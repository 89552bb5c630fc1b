"""The verbs of the privileged helper: all that can be asked of it, as data.

What a field may hold is declared here and checked before a verb is looked at; what needs more than a pattern
(addresses, that a name is this cloud's) is checked in `checks`. No field holds a path, an option, or text of another
program's language.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

# \Z, not $: that would let a newline through.
_ID = r"[0-9a-f]{8}-[0-9a-f]{2}"
Namespace = Annotated[str, Meta(pattern=rf"\Amn-[0-9a-f]{{8}}(-[nr]-{_ID})?\Z")]
Bridge = Annotated[str, Meta(pattern=rf"\Abrq{_ID}\Z")]
Tap = Annotated[str, Meta(pattern=rf"\Atap{_ID}\Z")]
Outer = Annotated[str, Meta(pattern=rf"\Avth{_ID}\Z")]
Inner = Annotated[str, Meta(pattern=rf"\Adev{_ID}\Z")]
Device = Annotated[str, Meta(pattern=rf"\A(brq|tap|vth|dev|ifb){_ID}\Z")]
Uuid = Annotated[str, Meta(pattern=r"\A[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")]
Mac = Annotated[str, Meta(pattern=r"\A[0-9a-f]{2}(:[0-9a-f]{2}){5}\Z")]
Text = Annotated[str, Meta(min_length=2, max_length=45, pattern=r"\A[0-9a-fA-F.:]+\Z")]  # an address: parsed later
Prefix = Annotated[str, Meta(min_length=4, max_length=49, pattern=r"\A[0-9a-fA-F.:]+/[0-9]{1,3}\Z")]
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HostName = Annotated[str, Meta(max_length=63, pattern=rf"\A{_LABEL}\Z")]
Domain = Annotated[str, Meta(max_length=254, pattern=rf"\A(?:{_LABEL}(?:\.{_LABEL})*\.?)?\Z")]
OptionName = Annotated[str, Meta(max_length=64, pattern=r"\A[0-9a-z][0-9a-z-]*\Z")]
OptionValue = Annotated[str, Meta(max_length=255, pattern=r"\A[A-Za-z0-9 ._:/@+=%-]*\Z")]
Mtu = Annotated[int, Meta(ge=68, le=65521)]
Number16 = Annotated[int, Meta(ge=0, le=65535)]
Number8 = Annotated[int, Meta(ge=0, le=255)]
Zone = Annotated[int, Meta(ge=1, le=65535)]
MOST_KILOBITS = 100_000_000
Kilobits = Annotated[int, Meta(ge=0, le=MOST_KILOBITS)]
# How a guest gets an IPv6 address: from the server; by itself, and the rest from the server; all of it by itself.
Mode = Literal["stateful", "stateless", "slaac"]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a verb."""


class Verb(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="verb"):
    """Something that the helper is asked to do. Doing it twice is like doing it once."""

    identity: ClassVar[tuple[str, ...]] = ()  # the fields that say what it is about, of which the rest is the content

    @property
    def key(self) -> tuple[str, ...]:
        """What the verb is about: a later one with the same key replaces it."""
        return (type(self).__name__, *(str(getattr(self, name)) for name in self.identity))


class EnsureNamespace(Verb, frozen=True, kw_only=True, tag="ensure_namespace"):
    """A network namespace; routers forward between its devices, others do not."""

    identity = ("namespace",)
    namespace: Namespace
    forward: bool = False


class DeleteNamespace(Verb, frozen=True, kw_only=True, tag="delete_namespace"):
    """No such namespace, and no device in it."""

    identity = ("namespace",)
    namespace: Namespace


class EnsureBridge(Verb, frozen=True, kw_only=True, tag="ensure_bridge"):
    """A bridge in the cloud's namespace."""

    identity = ("bridge",)
    bridge: Bridge
    mtu: Mtu = 1500


class EnsureTap(Verb, frozen=True, kw_only=True, tag="ensure_tap"):
    """A guest's tap is on its bridge and up; the answer says whether there is such a device.

    The tap is QEMU's: it is made by it and goes with it. With `create` it is made here instead.
    """

    identity = ("tap",)
    tap: Tap
    bridge: Bridge
    mtu: Mtu = 1500
    create: bool = False


class AdoptTap(Verb, frozen=True, kw_only=True, tag="adopt_tap"):
    """A guest's tap that a libvirt of the machine made is in the cloud's namespace; the answer says whether it is.

    Only for clouds that root started with such a libvirt.
    """

    identity = ("tap",)
    tap: Tap
    mac: Mac  # of the guest's interface
    guest: Uuid


class EnsureVeth(Verb, frozen=True, kw_only=True, tag="ensure_veth"):
    """A pair that joins a namespace to a bridge."""

    identity = ("outer",)
    outer: Outer
    bridge: Bridge
    namespace: Namespace
    inner: Inner
    mac: Mac
    mtu: Mtu = 1500


class DeleteLink(Verb, frozen=True, kw_only=True, tag="delete_link"):
    """No such device in the cloud's namespace."""

    identity = ("device",)
    device: Device


class SetAddresses(Verb, frozen=True, kw_only=True, tag="set_addresses"):
    """A device has these addresses and no others; link-local ones of IPv6 are the kernel's."""

    identity = ("namespace", "device")
    namespace: Namespace
    device: Device
    addresses: tuple[Prefix, ...] = ()


class Route(Part, frozen=True, kw_only=True):
    """A route by way of a neighbour, or straight to a device."""

    destination: Prefix
    via: Text | None = None
    device: Inner | None = None


class SetRoutes(Verb, frozen=True, kw_only=True, tag="set_routes"):
    """A namespace has these routes besides those that its addresses make, and no others."""

    identity = ("namespace",)
    namespace: Namespace
    routes: tuple[Route, ...] = ()


class Pair(Part, frozen=True, kw_only=True):
    """Addresses that a port may send from, by the MAC address that goes with them."""

    mac: Mac
    prefix: Prefix


class FilterRule(Part, frozen=True, kw_only=True):
    """What may pass in one direction. No protocol: any; no remote: anybody."""

    ingress: bool
    version: Annotated[int, Meta(ge=4, le=6)] = 4
    protocol: Number8 | None = None
    low: Number16 | None = None  # the first port, or the ICMP type
    high: Number16 | None = None  # the last port, or the ICMP code
    remote: Prefix | None = None
    remote_group: Uuid | None = None


class Guarded(Part, frozen=True, kw_only=True):
    """A guest's port behind its firewall."""

    tap: Tap
    zone: Zone
    stateful: bool = True  # answers pass as part of a connection; else the rules judge every packet
    pairs: tuple[Pair, ...] = ()
    rules: tuple[FilterRule, ...] = ()


class Plain(Part, frozen=True, kw_only=True):
    """A device on a bridge that nothing is filtered at, but whose connections belong to a network's zone."""

    device: Device
    zone: Zone


class Group(Part, frozen=True, kw_only=True):
    """The members of a security group that rules name as remote."""

    id: Uuid
    addresses: tuple[Prefix, ...] = ()


class LoadFirewall(Verb, frozen=True, kw_only=True, tag="load_firewall"):
    """The whole firewall between guests, replaced at once."""

    guarded: tuple[Guarded, ...] = ()
    plain: tuple[Plain, ...] = ()
    groups: tuple[Group, ...] = ()


class Floating(Part, frozen=True, kw_only=True):
    """A floating IP and the fixed one behind it."""

    floating: Text
    fixed: Text


class LoadRouter(Verb, frozen=True, kw_only=True, tag="load_router"):
    """A router's translation of addresses, replaced at once."""

    identity = ("namespace",)
    namespace: Namespace
    gateway: Inner | None = None
    source: Text | None = None  # what the rest of the world sees as the source of connections; None: no translation
    floating: tuple[Floating, ...] = ()


class DhcpRoute(Part, frozen=True, kw_only=True):
    """A route that guests are told of."""

    destination: Prefix
    via: Text


class DhcpSubnet(Part, frozen=True, kw_only=True):
    """A subnet that DHCP serves."""

    cidr: Prefix
    gateway: Text | None = None
    dns: tuple[Text, ...] = ()
    routes: tuple[DhcpRoute, ...] = ()
    advertise: bool = False  # tell guests of the range, so that they know how they get their addresses (IPv6)
    mode: Mode = "stateful"  # (IPv6)


class DhcpOption(Part, frozen=True, kw_only=True):
    """An option of one port."""

    name: OptionName
    value: OptionValue = ""
    version: Annotated[int, Meta(ge=4, le=6)] = 4


class DhcpHost(Part, frozen=True, kw_only=True):
    """A guest's interface: what it is given."""

    mac: Mac
    addresses: tuple[Text, ...] = ()
    own: tuple[Text, ...] = ()  # that it makes itself: for the DNS only
    name: HostName
    options: tuple[DhcpOption, ...] = ()


class StartDnsmasq(Verb, frozen=True, kw_only=True, tag="start_dnsmasq"):
    """A DHCP and DNS server in a network's namespace. What changes of its hosts and options does not restart it."""

    identity = ("namespace",)
    namespace: Namespace
    device: Inner
    mtu: Mtu = 1500
    domain: Domain = ""
    subnets: Annotated[tuple[DhcpSubnet, ...], Meta(max_length=64)] = ()
    hosts: tuple[DhcpHost, ...] = ()


class Advertised(Part, frozen=True, kw_only=True):
    """What a router tells of one of its interfaces."""

    device: Inner
    mtu: Mtu = 1500
    subnets: Annotated[tuple[DhcpSubnet, ...], Meta(min_length=1, max_length=64)]


class StartAdvertiser(Verb, frozen=True, kw_only=True, tag="start_advertiser"):
    """A router announces itself, its ranges and how addresses are got to the guests on its interfaces (IPv6)."""

    identity = ("namespace",)
    namespace: Namespace
    domain: Domain = ""
    links: Annotated[tuple[Advertised, ...], Meta(min_length=1, max_length=256)]


class StopDnsmasq(Verb, frozen=True, kw_only=True, tag="stop_dnsmasq"):
    """No server in a network's namespace, no advertiser in a router's."""

    identity = ("namespace",)
    namespace: Namespace


class SetBandwidth(Verb, frozen=True, kw_only=True, tag="set_bandwidth"):
    """How fast a guest may receive and send, in kilobits a second; 0 is as fast as it can.

    A burst is how many kilobits may pass at once after a rest; 0 is what suits the rate.
    """

    identity = ("tap",)
    tap: Tap
    receive: Kilobits = 0
    send: Kilobits = 0
    receive_burst: Kilobits = 0
    send_burst: Kilobits = 0


class Inventory(Verb, frozen=True, kw_only=True, tag="inventory"):
    """What there is of this cloud."""


class WatchLinks(Verb, frozen=True, kw_only=True, tag="watch_links"):
    """A socket that tells when a device of the cloud's namespace comes or goes; or one outside, whence taps come."""

    outside: bool = False


class ListenMetadata(Verb, frozen=True, kw_only=True, tag="listen_metadata"):
    """A socket that listens at 169.254.169.254:80 in a network's namespace."""

    identity = ("namespace",)
    namespace: Namespace


class Connect(Verb, frozen=True, kw_only=True, tag="connect"):
    """A TCP connection from the cloud's namespace, e.g. to a floating IP."""

    identity = ("address",)
    address: Text
    port: Annotated[int, Meta(ge=1, le=65535)]
    timeout: Annotated[float, Meta(gt=0, le=10)] = 5.0


class Cleanup(Verb, frozen=True, kw_only=True, tag="cleanup"):
    """Nothing of this cloud is left."""


AnyVerb = (
    EnsureNamespace | DeleteNamespace | EnsureBridge | EnsureTap | AdoptTap | EnsureVeth | DeleteLink | SetAddresses
    | SetRoutes | LoadFirewall | LoadRouter | StartDnsmasq | StartAdvertiser | StopDnsmasq | SetBandwidth | Inventory
    | WatchLinks | ListenMetadata | Connect | Cleanup
)  # fmt: skip


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A device in the cloud's namespace."""

    index: int
    bridge: str = ""  # that it is on
    up: bool = False
    limited: bool = False  # it receives, or sends, no faster than it was told


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `inventory`."""

    namespaces: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()  # namespaces that have a living dnsmasq
    links: dict[str, Link] = {}
    adopts: bool = False  # taps are made outside the cloud's namespace, and taken into it
    outside: tuple[str, ...] = ()  # those that are named as guests' are, whoever's they may be


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the helper answers; a socket comes beside it."""

    error: str = ""  # empty: it is done
    found: Found | None = None
    present: bool = True
