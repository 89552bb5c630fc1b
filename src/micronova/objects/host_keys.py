"""What a conductor gives a compute host, so that it needs no password of the cloud's."""

import msgspec


class HostKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Good for one host alone, and for a short while."""

    ticket: str  # for the embedded network service
    metadata_key: str  # signs what the host's metadata proxies say
    expires_at: int  # seconds since the epoch
    lifetime: float  # seconds from now: a host's own clock may be wrong
