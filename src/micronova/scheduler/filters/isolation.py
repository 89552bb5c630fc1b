"""IsolatedHostsFilter: keeps images and hosts that the settings name to each other."""

from micronova.objects.scheduling import RequestSpec
from micronova.scheduler.filters.base import HostFilter, Scope
from micronova.scheduler.host_columns import Bools
from micronova.scheduler.host_view import HostView


class IsolatedHostsFilter(HostFilter):
    """Passes the hosts in `isolated_hosts` for the images in `isolated_images`, and the other hosts for the others.

    With `restrict_isolated_hosts_to_isolated_images = false` the isolated hosts take other images, too.
    """

    name = "IsolatedHostsFilter"
    predicate = "takes this image"
    lack = "do not take the image"
    scope = Scope.REQUEST
    compares_images = True

    def mask(self, hosts: HostView, spec: RequestSpec) -> Bools | None:
        settings = self.options.settings
        if spec.image is not None and spec.image.id in settings.isolated_images:
            return hosts.on_hosts(settings.isolated_hosts)
        if not (settings.restrict_isolated_hosts_to_isolated_images and settings.isolated_hosts):
            return None
        return ~hosts.on_hosts(settings.isolated_hosts)
