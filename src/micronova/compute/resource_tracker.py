"""The resources of a node: what it has, what its instances hold, and what is left.

An instance holds what the scheduler claims for it, by the same rule (`placement.extra_specs.node_resources`); its guest
may use more or less, if the flavor has extra specs `resources:CLASS`. A claim counts at once, before the hypervisor
knows of the guest. The periodic update takes over what the hypervisor reports: instances that are worked on keep
what they hold, and other claims without a guest are dropped. The scheduler has claimed the resources in the database
before an order arrives, so the tracker may only refuse.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple

import msgspec

from micronova.compute.settings import ComputeAgentSettings
from micronova.objects.errors import InsufficientResources, Unavailable
from micronova.objects.orders import Guest, NodeResources, WorkOrder
from micronova.placement import extra_specs
from micronova.placement.model import capacity
from micronova.placement.standard import NODE_CLASSES

_MOST_DOUBTS: Final = 1000
_NAMES: Final = {"VCPU": "vcpus", "MEMORY_MB": "MB of memory", "DISK_GB": "GB of disk"}


class _Shortage(NamedTuple):
    """A resource that does not suffice."""

    resource_class: str
    missing: str  # for admins


class ResourceTracker:
    """Tracks the resources of one node."""

    def __init__(self, resources: NodeResources, settings: ComputeAgentSettings) -> None:
        self._reserved = settings.reserved()
        self._fixed = settings.fixed_allocation_ratios
        self._initial = settings.initial_allocation_ratios
        self._ratios = self._initial | self._fixed
        # Instances that did not fit by ratios that are not fixed: whether these were asked for and told since.
        self._doubts: dict[str, Literal["new", "asked", "told"]] = {}
        self._held: dict[str, dict[str, int]] = {}
        self._used: dict[str, int] = {}
        self._foreign: dict[str, int] = {}
        self._resources = resources
        self.changed = True
        """Whether the resources differ from those of the last report to the conductor."""

    @property
    def node(self) -> str:
        """The node's name."""
        return self._resources.node

    def used(self) -> dict[str, int]:
        """Return what is used, by resource class: by instances, including those being built, and by everything else."""
        return {name: self._used.get(name, 0) + self._foreign.get(name, 0) for name in NODE_CLASSES}

    @contextmanager
    def instance_claim(self, order: WorkOrder) -> Iterator[None]:
        """Hold what an instance needs; release it if the body of the `with` fails."""
        self.hold(order)
        try:
            yield
        except BaseException:
            self.release(order.instance.uuid)
            raise

    def hold(self, order: WorkOrder) -> None:
        """Hold what an instance needs, in place of what it holds; raise InsufficientResources if it does not fit.

        What the instance holds already is never refused, even if the node has less than that by now. Raise Unavailable
        if the allocation ratio may have changed: the next heartbeat asks for it.
        """
        uuid = order.instance.uuid
        wanted = _claimed(order)
        held = self._held.get(uuid, {})
        used = self.used()
        for name, amount in held.items():
            used[name] -= amount
        more = {name: amount for name, amount in wanted.items() if amount > held.get(name, 0)}
        shortage = _shortage(more, used, self._limits())
        if shortage is not None:
            # The owner of the server reads the message; which node it is and what others use are for admins.
            message = "The host has not enough resources left for the server."
            details = f"{self.node}: {shortage.missing}"
            if shortage.resource_class in self._fixed or self._doubts.pop(uuid, None) == "told":
                raise InsufficientResources(message, details=details)
            self._doubts[uuid] = "new"
            if len(self._doubts) > _MOST_DOUBTS:  # of instances that went elsewhere
                del self._doubts[next(iter(self._doubts))]
            self.changed = True
            raise Unavailable(message, details=details)
        self.keep(order)

    def keep(self, order: WorkOrder) -> None:
        """Note what an instance holds that stays on this node: its claim is in the database, so nothing is checked."""
        self._set_held(order.instance.uuid, _claimed(order))
        self._doubts.pop(order.instance.uuid, None)
        self.changed = True

    def release(self, uuid: str) -> None:
        """Release the resources of an instance."""
        held = self._held.pop(uuid, None)
        if held is not None:
            for name, amount in held.items():
                self._used[name] -= amount
            self.changed = True

    def update(self, resources: NodeResources, guests: Iterable[Guest], busy: Collection[str]) -> None:
        """Take over what the hypervisor reports; instances that are worked on keep what they hold."""
        before = self.report()
        self._resources = resources
        ours = dict.fromkeys(NODE_CLASSES, 0)
        present = set()
        for guest in guests:
            present.add(guest.uuid)
            amounts = {
                "VCPU": guest.vcpus,
                "PCPU": guest.pcpus,
                "MEMORY_MB": guest.memory_mb,
                "DISK_GB": guest.local_gb,
            }
            for name, amount in amounts.items():
                ours[name] += amount
            if guest.uuid not in busy:
                self._set_held(guest.uuid, amounts if guest.claimed is None else _counted(guest.claimed))
        for uuid in self._held.keys() - present - set(busy):
            self.release(uuid)
        seen = {
            "VCPU": resources.vcpus_used,
            "PCPU": resources.pcpus_used,
            "MEMORY_MB": resources.memory_mb_used,
            "DISK_GB": resources.local_gb_used,
        }
        # Guests of other clouds and the hypervisor itself use resources as well.
        self._foreign = {name: max(0, amount - ours[name]) for name, amount in seen.items()}
        self.changed = self.changed or self.report() != before

    def report(self) -> NodeResources:
        """Return the node as it is reported to the conductor."""
        used = self.used()
        return msgspec.structs.replace(
            self._resources,
            vcpus_used=used["VCPU"],
            pcpus_used=used["PCPU"],
            memory_mb_used=used["MEMORY_MB"],
            local_gb_used=used["DISK_GB"],
            reserved=self._reserved,
            allocation_ratios=self._fixed,
            initial_allocation_ratios=self._initial,
        )

    def take_report(self) -> NodeResources:
        """Return the node for a heartbeat; the reply to that tells the allocation ratios."""
        self.changed = False
        self._doubts |= {uuid: "asked" for uuid, state in self._doubts.items() if state == "new"}
        return self.report()

    def set_allocation_ratios(self, ratios: Mapping[str, float]) -> None:
        """Take over the allocation ratios of the node's inventories, except those that settings fix.

        A heartbeat that was sent before a claim did not fit may tell ratios of before.
        """
        self._ratios = {**self._initial, **ratios, **self._fixed}
        self._doubts |= {uuid: "told" for uuid, state in self._doubts.items() if state == "asked"}

    def _limits(self) -> dict[str, int]:
        """Return how much may be used, by resource class.

        Dedicated CPUs have no limit here: they are claimed by name, and drivers refuse those that a guest still has.
        """
        has = self._resources
        total = {"VCPU": has.vcpus, "MEMORY_MB": has.memory_mb, "DISK_GB": has.local_gb}
        return {name: capacity(amount, self._reserved[name], self._ratios[name]) for name, amount in total.items()}

    def _set_held(self, uuid: str, amounts: dict[str, int]) -> None:
        for name, amount in self._held.get(uuid, {}).items():
            self._used[name] -= amount
        self._held[uuid] = amounts
        for name, amount in amounts.items():
            self._used[name] = self._used.get(name, 0) + amount


def _claimed(order: WorkOrder) -> dict[str, int]:
    return _counted(extra_specs.node_resources(order.instance.flavor, order.instance.image))


def _counted(amounts: Mapping[str, int]) -> dict[str, int]:
    """Return the amounts of the classes that hosts report; the database alone counts others."""
    return {name: amounts[name] for name in NODE_CLASSES if name in amounts}


def _shortage(wanted: Mapping[str, int], used: Mapping[str, int], limits: Mapping[str, int]) -> _Shortage | None:
    """Return the first shortage, or None if everything fits.

    A class without a limit always fits.
    """
    for name, amount in wanted.items():
        limit = limits.get(name)
        if limit is not None and used.get(name, 0) + amount > limit:
            left = max(0, limit - used.get(name, 0))
            return _Shortage(name, f"{amount} {_NAMES.get(name, name)} asked for, {left} left")
    return None
