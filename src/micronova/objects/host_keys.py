"""The keys that a conductor gives to a compute host, which holds no password of a service user."""

import msgspec


class HostKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Short-lived keys of one host."""

    ticket: str  # for the embedded network service
    metadata_key: str  # signs the requests of the host's metadata proxies
    expires_at: int  # seconds since 1970 (UTC)
    lifetime: float  # seconds from now, because the clock of a host may be wrong
