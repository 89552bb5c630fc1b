"""The verbs of the privileged helper, as data.

The types of the fields are checked when a verb is decoded; `checks` does the rest, such as parsing addresses. No
field holds a path, an option, or text in the language of another program. A verb's docstring describes the state after
it.
"""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

# \Z, because $ would allow a newline at the end.
_ID = r"[0-9a-f]{8}-[0-9a-f]{2}"
Namespace = Annotated[str, Meta(pattern=rf"\Amn-[0-9a-f]{{8}}(-[nr]-{_ID})?\Z")]
Bridge = Annotated[str, Meta(pattern=rf"\Abrq{_ID}\Z")]
Tap = Annotated[str, Meta(pattern=rf"\Atap{_ID}\Z")]
Outer = Annotated[str, Meta(pattern=rf"\Avth{_ID}\Z")]
Inner = Annotated[str, Meta(pattern=rf"\Adev{_ID}\Z")]
Device = Annotated[str, Meta(pattern=rf"\A(brq|tap|vth|dev|ifb|vlp){_ID}\Z")]
Uuid = Annotated[str, Meta(pattern=r"\A[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")]
Mac = Annotated[str, Meta(pattern=r"\A[0-9a-f]{2}(:[0-9a-f]{2}){5}\Z")]
Address = Annotated[str, Meta(min_length=2, max_length=45, pattern=r"\A[0-9a-fA-F.:]+\Z")]  # `checks` parses it
Prefix = Annotated[str, Meta(min_length=4, max_length=49, pattern=r"\A[0-9a-fA-F.:]+/[0-9]{1,3}\Z")]
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HostName = Annotated[str, Meta(max_length=63, pattern=rf"\A{_LABEL}\Z")]
Domain = Annotated[str, Meta(max_length=254, pattern=rf"\A(?:{_LABEL}(?:\.{_LABEL})*\.?)?\Z")]
OptionName = Annotated[str, Meta(max_length=64, pattern=r"\A[0-9a-z][0-9a-z-]*\Z")]
OptionValue = Annotated[str, Meta(max_length=255, pattern=r"\A[A-Za-z0-9 ._:/@+=%-]*\Z")]
Mtu = Annotated[int, Meta(ge=68, le=65521)]
Number16 = Annotated[int, Meta(ge=0, le=65535)]
Number8 = Annotated[int, Meta(ge=0, le=255)]
MAX_ZONE = 65535
Zone = Annotated[int, Meta(ge=1, le=MAX_ZONE)]  # of connection tracking
Dscp = Annotated[int, Meta(ge=0, le=63)]  # a differentiated services code point
MAX_TAPS = 0xFFFE  # of a firewall; numbers of 16 bits, 0 and the last are reserved
MAX_KILOBITS = 100_000_000
Kilobits = Annotated[int, Meta(ge=0, le=MAX_KILOBITS)]
# How a guest gets its IPv6 configuration: from DHCPv6; address by SLAAC, the rest from DHCPv6; all by advertisements.
Mode = Literal["stateful", "stateless", "slaac"]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a verb."""


class Verb(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="verb"):
    """A request to the helper; it may be repeated."""

    identity: ClassVar[tuple[str, ...]] = ()  # the fields that name the object; the others describe it

    @property
    def key(self) -> tuple[str, ...]:
        """The object of the verb; a later verb with the same key replaces this one."""
        return (type(self).__name__, *(str(getattr(self, name)) for name in self.identity))


class EnsureNamespace(Verb, frozen=True, kw_only=True, tag="ensure_namespace"):
    """There is a network namespace; it forwards packets only if `forward` is set."""

    identity = ("namespace",)
    namespace: Namespace
    forward: bool = False


class DeleteNamespace(Verb, frozen=True, kw_only=True, tag="delete_namespace"):
    """There is no such namespace, nor its devices and server."""

    identity = ("namespace",)
    namespace: Namespace


class EnsureBridge(Verb, frozen=True, kw_only=True, tag="ensure_bridge"):
    """There is a bridge in the cloud's namespace."""

    identity = ("bridge",)
    bridge: Bridge
    mtu: Mtu = 1500


class EnsureTap(Verb, frozen=True, kw_only=True, tag="ensure_tap"):
    """A guest's tap is plugged into its bridge and up; the reply says whether the tap exists.

    Usually QEMU creates the tap and deletes it when it ends. With `create` the helper creates it.
    """

    identity = ("tap",)
    tap: Tap
    bridge: Bridge
    mtu: Mtu = 1500
    create: bool = False


class AdoptTap(Verb, frozen=True, kw_only=True, tag="adopt_tap"):
    """A guest's tap that a libvirt of the machine created is in the cloud's namespace; the reply says whether it is.

    Only for clouds that root started for guests of such a libvirt.
    """

    identity = ("tap",)
    tap: Tap
    mac: Mac  # of the guest's interface
    guest: Uuid


class Subport(Part, frozen=True, kw_only=True):
    """A port of a guest in a VLAN of another port; a veth pair stands for its tap."""

    tap: Tap
    vlan: Annotated[int, Meta(ge=1, le=4094)]
    mtu: Mtu = 1500


class EnsureTrunk(Verb, frozen=True, kw_only=True, tag="ensure_trunk"):
    """A guest's tap carries these subports and no others; the reply says whether the tap exists.

    A subport's tap is then there, and `ensure_tap` plugs it into the bridge of its network.
    """

    identity = ("tap",)
    tap: Tap
    subports: Annotated[tuple[Subport, ...], Meta(max_length=4094)] = ()


class EnsureVeth(Verb, frozen=True, kw_only=True, tag="ensure_veth"):
    """A veth pair connects a namespace to a bridge."""

    identity = ("outer",)
    outer: Outer
    bridge: Bridge
    namespace: Namespace
    inner: Inner
    mac: Mac
    mtu: Mtu = 1500


class DeleteLink(Verb, frozen=True, kw_only=True, tag="delete_link"):
    """There is no such device in the cloud's namespace."""

    identity = ("device",)
    device: Device


class SetAddresses(Verb, frozen=True, kw_only=True, tag="set_addresses"):
    """A device has these addresses and no others, except IPv6 link-local ones."""

    identity = ("namespace", "device")
    namespace: Namespace
    device: Device
    addresses: tuple[Prefix, ...] = ()


class Route(Part, frozen=True, kw_only=True):
    """A route to a next hop, or directly to a device."""

    destination: Prefix
    via: Address | None = None
    device: Inner | None = None


class SetRoutes(Verb, frozen=True, kw_only=True, tag="set_routes"):
    """A namespace has these routes and those of its addresses, and no others."""

    identity = ("namespace",)
    namespace: Namespace
    routes: tuple[Route, ...] = ()


class Pair(Part, frozen=True, kw_only=True):
    """A range of source addresses that a port may use with a MAC address."""

    mac: Mac
    prefix: Prefix


class FilterRule(Part, frozen=True, kw_only=True):
    """A security group rule; without a protocol or a remote it allows any."""

    ingress: bool
    version: Annotated[int, Meta(ge=4, le=6)] = 4
    protocol: Number8 | None = None
    low: Number16 | None = None  # the first port, or the ICMP type
    high: Number16 | None = None  # the last port, or the ICMP code
    remote: Prefix | None = None
    remote_group: Uuid | None = None


class FilteredPort(Part, frozen=True, kw_only=True):
    """A guest's port with port security."""

    tap: Tap
    zone: Zone
    stateful: bool = True  # replies pass because of their connection; otherwise the rules decide about every packet
    dscp: Dscp | None = None  # the mark of what it sends; None: as the guest sets it
    pairs: tuple[Pair, ...] = ()
    rules: tuple[FilterRule, ...] = ()


class UnfilteredDevice(Part, frozen=True, kw_only=True):
    """A device on a bridge without a filter; its connections are tracked in the network's zone."""

    device: Device
    zone: Zone
    dscp: Dscp | None = None  # the mark of what it sends, if it is a tap


class Group(Part, frozen=True, kw_only=True):
    """The addresses of a security group that rules name as remote."""

    id: Uuid
    addresses: tuple[Prefix, ...] = ()


class LoadFirewall(Verb, frozen=True, kw_only=True, tag="load_firewall"):
    """The firewall between guests has exactly these rules; it is replaced in one transaction.

    A port whose rules cannot be loaded is closed, and the reply names its tap.
    """

    filtered: tuple[FilteredPort, ...] = ()
    unfiltered: tuple[UnfilteredDevice, ...] = ()
    groups: tuple[Group, ...] = ()
    connections: Annotated[int, Meta(ge=0, le=1 << 24)] = 0  # per port; 0 is no limit


class CheckFirewall(Verb, frozen=True, kw_only=True, tag="check_firewall"):
    """The kernel filters bridged packets: two taps in a namespace of their own have shown it."""


class Floating(Part, frozen=True, kw_only=True):
    """A floating IP and its fixed address."""

    floating: Address
    fixed: Address


ScopeNumber = Annotated[int, Meta(ge=0, le=65535)]


class Scoped(Part, frozen=True, kw_only=True):
    """The address scopes of a router's device: numbers, by address family; 0 is none."""

    device: Inner
    four: ScopeNumber = 0
    six: ScopeNumber = 0


class LoadRouter(Verb, frozen=True, kw_only=True, tag="load_router"):
    """A router has exactly these address translations and address scopes; they are replaced in one transaction.

    Only what is translated passes between devices of different scopes. Between the gateway and devices of its scope
    nothing is translated but floating IPs.
    """

    identity = ("namespace",)
    namespace: Namespace
    gateway: Inner | None = None
    source: Address | None = None  # the source address of connections through the gateway; None: no source NAT
    floating: tuple[Floating, ...] = ()
    scopes: tuple[Scoped, ...] = ()  # of all devices; none if no device has one


class DhcpRoute(Part, frozen=True, kw_only=True):
    """A route that DHCP sends to guests."""

    destination: Prefix
    via: Address


class DhcpSubnet(Part, frozen=True, kw_only=True):
    """A subnet that DHCP serves."""

    cidr: Prefix
    gateway: Address | None = None
    dns: tuple[Address, ...] = ()
    routes: tuple[DhcpRoute, ...] = ()
    advertise: bool = False  # send router advertisements for the range (IPv6)
    mode: Mode = "stateful"  # (IPv6)


class DhcpOption(Part, frozen=True, kw_only=True):
    """A DHCP option of one port."""

    name: OptionName
    value: OptionValue = ""
    version: Annotated[int, Meta(ge=4, le=6)] = 4


class DhcpHost(Part, frozen=True, kw_only=True):
    """What DHCP and DNS know of a guest's interface."""

    mac: Mac
    addresses: tuple[Address, ...] = ()
    own: tuple[Address, ...] = ()  # not leased, for DNS only
    name: HostName
    options: tuple[DhcpOption, ...] = ()


class StartDnsmasq(Verb, frozen=True, kw_only=True, tag="start_dnsmasq"):
    """A DHCP and DNS server runs in a network's namespace; changed hosts and options do not restart it."""

    identity = ("namespace",)
    namespace: Namespace
    device: Inner
    mtu: Mtu = 1500
    domain: Domain = ""
    subnets: Annotated[tuple[DhcpSubnet, ...], Meta(max_length=64)] = ()
    hosts: tuple[DhcpHost, ...] = ()


class Advertised(Part, frozen=True, kw_only=True):
    """What a router advertises on one of its interfaces."""

    device: Inner
    mtu: Mtu = 1500
    subnets: Annotated[tuple[DhcpSubnet, ...], Meta(min_length=1, max_length=64)]


class StartAdvertiser(Verb, frozen=True, kw_only=True, tag="start_advertiser"):
    """A router sends advertisements with its IPv6 prefixes on its interfaces."""

    identity = ("namespace",)
    namespace: Namespace
    domain: Domain = ""
    links: Annotated[tuple[Advertised, ...], Meta(min_length=1, max_length=256)]


class StopDnsmasq(Verb, frozen=True, kw_only=True, tag="stop_dnsmasq"):
    """There is no DHCP server or advertiser in a namespace."""

    identity = ("namespace",)
    namespace: Namespace


class SetBandwidth(Verb, frozen=True, kw_only=True, tag="set_bandwidth"):
    """A guest receives and sends at most so many kilobits per second; 0 is no limit.

    A burst is how many kilobits may pass at once after a rest; 0 is what suits the rate.
    """

    identity = ("tap",)
    tap: Tap
    receive: Kilobits = 0
    send: Kilobits = 0
    receive_burst: Kilobits = 0
    send_burst: Kilobits = 0


class Inventory(Verb, frozen=True, kw_only=True, tag="inventory"):
    """The reply lists the namespaces, devices and dnsmasq processes of this cloud."""


class Ping(Verb, frozen=True, kw_only=True, tag="ping"):
    """Nothing has changed; the verbs before this one are done."""


class WatchLinks(Verb, frozen=True, kw_only=True, tag="watch_links"):
    """The reply has a socket that receives changes of devices in the cloud's namespace, or outside of it."""

    outside: bool = False


class ListenMetadata(Verb, frozen=True, kw_only=True, tag="listen_metadata"):
    """The reply has a socket that listens at 169.254.169.254:80 in a network's namespace."""

    identity = ("namespace",)
    namespace: Namespace


class Connect(Verb, frozen=True, kw_only=True, tag="connect"):
    """The reply has a TCP connection from the cloud's namespace, e.g. to a floating IP."""

    identity = ("address",)
    address: Address
    port: Annotated[int, Meta(ge=1, le=65535)]
    timeout: Annotated[float, Meta(gt=0, le=10)] = 5.0


class Cleanup(Verb, frozen=True, kw_only=True, tag="cleanup"):
    """There is no namespace, device or server of this cloud."""


AnyVerb = (
    EnsureNamespace | DeleteNamespace | EnsureBridge | EnsureTap | AdoptTap | EnsureTrunk | EnsureVeth | DeleteLink
    | SetAddresses | SetRoutes | LoadFirewall | CheckFirewall | LoadRouter | StartDnsmasq | StartAdvertiser
    | StopDnsmasq | SetBandwidth | Inventory | Ping | WatchLinks | ListenMetadata | Connect | Cleanup
)  # fmt: skip


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A device in the cloud's namespace."""

    index: int
    bridge: str = ""  # into which it is plugged
    up: bool = False
    limited: bool = False  # it has a bandwidth limit
    trunk: bool = False  # it carries subports


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to `inventory`."""

    namespaces: tuple[str, ...] = ()
    # namespaces with a running dnsmasq, and its process id; helpers of other versions know the name `servers`
    dnsmasq: dict[str, int] = msgspec.field(default_factory=dict, name="servers")
    links: dict[str, Link] = {}
    adopts: bool = False  # taps are created outside the cloud's namespace and have to be adopted
    outside: tuple[str, ...] = ()  # taps out there that have the name of a guest's tap; they may belong to others


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The helper's reply; a socket is passed with it."""

    error: str = ""  # empty: the verb succeeded
    found: Found | None = None
    present: bool = True
    pid: int = 0  # of the dnsmasq that was started or runs
    closed: dict[str, str] = {}  # taps whose rules cannot be loaded, and the reason
