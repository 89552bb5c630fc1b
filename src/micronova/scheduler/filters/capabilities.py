"""ComputeCapabilitiesFilter: compares a flavor's extra specs with the capabilities of hosts."""

from collections.abc import Mapping, Sequence

import numpy as np

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.attributes import FACTS, NUMBERS, RATIOS, TEXTS, find_fact
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.filters.operators import Requirement, check_requirements, key_in
from micronova.scheduler.host_columns import Bools, Facts
from micronova.scheduler.host_view import HostView

_NAMESPACE = "capabilities"


class ComputeCapabilitiesFilter(HostFilter):
    """Passes hosts that fulfil every extra spec of the namespace `capabilities`, and those without a namespace.

    A host that does not know an extra spec without a namespace passes, as in Nova: the spec may be another program's.
    """

    name = "ComputeCapabilitiesFilter"
    predicate = "has the capabilities that the extra specs of the flavor ask for"
    lack = "have other capabilities"
    scope = Scope.HOST
    extra_specs = frozenset({_NAMESPACE})

    def check(self, hints: Mapping[str, Sequence[str]], extra_specs: Mapping[str, str]) -> None:
        check_requirements(extra_specs, _NAMESPACE)

    def reads_extra_spec(self, name: str) -> bool:
        return name in NUMBERS or name in TEXTS or name in FACTS or super().reads_extra_spec(name)

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        passes: Bools | None = None
        facts: list[tuple[str, str, bool]] = []
        for key, text in spec.flavor.extra_specs.items():
            path = key_in(_NAMESPACE, key)
            if path is None:
                continue
            if path in NUMBERS:
                mask = Requirement(text).match_column(NUMBERS[path](hosts), float if path in RATIOS else int)
            elif path in TEXTS:
                mask = np.fromiter(map(Requirement(text).match, TEXTS[path](hosts)), np.bool_, len(hosts))
            else:
                facts.append((path, text, ":" in key))
                continue
            passes = mask if passes is None else passes & mask
        if facts:
            mask = hosts.by_facts((self.name, *facts), lambda host: _has_all(host, facts))
            passes = mask if passes is None else passes & mask
        return passes


def _has_all(host: Facts, wanted: list[tuple[str, str, bool]]) -> bool:
    for path, text, must_be_known in wanted:
        value = find_fact(host, path)
        if must_be_known if value is None else not Requirement(text).match(value):
            return False
    return True
