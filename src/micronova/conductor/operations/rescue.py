"""Rescuing a server: its guest boots from another image, so that its own disk can be repaired.

The order has the image, which the API has looked up, a ticket for it and the password for the guest. Unrescuing has
none of these: it is one of the power kinds.
"""

import sqlalchemy as sa

from micronova.conductor.operations.dependencies import ConductorDependencies
from micronova.conductor.operations.engine import Operation
from micronova.conductor.operations.orders import work_order
from micronova.conductor.operations.power import Power
from micronova.objects.image import ImageMeta
from micronova.objects.instance import InstanceChanges, InstanceRow
from micronova.objects.operations import RescuePayload
from micronova.objects.orders import WorkOrder


class Rescue(Power):
    """The operation behind the action `rescue`."""

    def __init__(self, dependencies: ConductorDependencies) -> None:
        super().__init__(dependencies, "rescue")

    def order(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> WorkOrder:
        """Return the order to boot the guest from the rescue image."""
        image = _image(operation)
        return work_order(
            conn,
            operation,
            row,
            now=self._engine.now(),
            secrets=self.secrets_of(operation),
            image_url=self._dependencies.download_url(image.id),
            rescue_image=image,
        )

    def succeeded(self, conn: sa.Connection, operation: Operation, row: InstanceRow) -> InstanceChanges:
        """Note when the rescue began: `rescue_timeout` counts from then on."""
        return {"launched_at": self._engine.now()}

    def notification_details(self, operation: Operation) -> dict[str, str]:
        """Return the rescue image."""
        image = _image(operation)
        return {"rescue_image_ref": image.id, "rescue_image_name": image.name}


def _image(operation: Operation) -> ImageMeta:
    return operation.payload_as(RescuePayload).image
