"""Setting the password of a guest's administrator. The caller waits for the end: the payload says what went wrong.

The password is among the operation's secrets, which are erased at its end. If the server has an RSA key, the password
is stored encrypted with it, as one that the guest has made itself: `GET /servers/{id}/os-server-password` returns it.
"""

import base64
import logging

import msgspec
import sqlalchemy as sa
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.orders import work_order
from micronova.conductor.operations.power import Power
from micronova.db import server_passwords
from micronova.objects.instance import InstanceChanges, InstanceRow
from micronova.objects.operations import PasswordPayload
from micronova.objects.orders import WorkOrder

log = logging.getLogger(__name__)


class ChangePassword(Power):
    """The operation behind the action `changePassword`."""

    def __init__(self, dependencies: ConductorDependencies) -> None:
        super().__init__(dependencies, "change_password")

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order with the password."""
        return work_order(conn, operation, row, now=self._engine.now(), secrets=self.secrets_of(operation))

    def succeeded(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> InstanceChanges:
        """Store the password, encrypted with the server's RSA key."""
        password = self.secrets_of(operation).admin_password
        if password is not None and row["key_data"] is not None:
            encrypted = encrypt(password, row["key_data"])
            if encrypted is not None:
                server_passwords.replace(conn, row["uuid"], encrypted, self._engine.now())
        return {}

    def failed_payload(self, operation: Operation, code: str | None, message: str) -> bytes | None:
        """Return the payload with the error for the caller."""
        payload = operation.payload_as(PasswordPayload)
        return msgspec.structs.replace(payload, error_code=code, error=message).encode()


def encrypt(password: str, public_key: str) -> str | None:
    """Return the password encrypted with an SSH key, in base64; None if the key is none of RSA, or too short for it."""
    if not public_key.startswith("ssh-rsa"):
        return None
    try:
        key = load_ssh_public_key(public_key.encode())
        assert isinstance(key, RSAPublicKey)
        return base64.b64encode(key.encrypt(password.encode(), padding.PKCS1v15())).decode()
    except (ValueError, UnsupportedAlgorithm) as error:
        log.warning("the new password of a server is not stored: its key cannot encrypt it: %s", error)
        return None
