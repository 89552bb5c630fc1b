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
            if is_postgres:
                begin_tls_with_postgres(sock)
            with context.wrap_socket(sock, server_hostname="127.0.0.1") as connection:
                return connection.getpeercert(binary_form=True) == wanted
    except OSError:
        return False


def begin_tls_with_postgres(sock: socket.socket) -> bool:
    """Ask PostgreSQL for TLS, with which it begins only then; return whether it does."""
    sock.sendall(_POSTGRES_TLS)
    return sock.recv(1) == b"S"
