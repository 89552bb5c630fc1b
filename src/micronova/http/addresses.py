"""What clients are told apart by when connections, failures and waiting requests are counted."""

import functools
import ipaddress


@functools.lru_cache(4096)
def client_network(address: str) -> str:
    """Return the address of a client; of an IPv6 client its /64 network, in which it can choose any address.

    An IPv4 address within IPv6 is an IPv4 address. What is no address is returned unchanged.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, 64), strict=False))
