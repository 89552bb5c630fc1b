"""Which certificate a process on this machine shows to its clients."""

import socket
import ssl
import struct
from pathlib import Path

_POSTGRES_TLS = struct.pack("!II", 8, 80_877_103)  # SSLRequest: its length and its code
_TIMEOUT = 30.0


def shows(port: int, certificate: Path, authority: Path, *, is_postgres: bool) -> bool:
    """Return whether what listens on a port shows a certificate; False if it does not answer."""
    wanted = ssl.PEM_cert_to_DER_cert(certificate.read_text())
    context = ssl.create_default_context(cafile=authority)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT) as sock:
            if is_postgres:  # it begins with TLS when its client has asked for that
                sock.sendall(_POSTGRES_TLS)
                sock.recv(1)
            with context.wrap_socket(sock, server_hostname="127.0.0.1") as connection:
                return connection.getpeercert(binary_form=True) == wanted
    except OSError:
        return False
