"""MetricsFilter: only hosts that measure what the metrics weigher needs."""

import numpy as np

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.host_columns import Bools
from micronova.scheduler.host_view import HostView


class MetricsFilter(HostFilter):
    """Passes hosts whose monitors have measured each metric that `metrics.weight_setting` names."""

    name = "MetricsFilter"
    predicate = "reports the metrics that this cloud places servers by"
    lack = "lack metrics"
    scope = Scope.REQUEST

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        passes: Bools | None = None
        for name in self.options.metrics.ratios():
            known = ~np.isnan(hosts.metric(name))
            passes = known if passes is None else passes & known
        return passes
