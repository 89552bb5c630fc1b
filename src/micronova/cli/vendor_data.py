"""The source of vendor data, which compute agents and the metadata service make from the settings."""

from micronova.conf.api import APISettings
from micronova.conf.settings import SettingsError
from micronova.metadata import vendordata


def vendor_data_source(settings: APISettings) -> vendordata.VendorDataSource:
    """Return the source of vendor data for guests."""
    providers = set(settings.vendordata_providers)
    unknown = providers - {vendordata.STATIC, vendordata.DYNAMIC}
    if unknown:
        raise SettingsError(
            f"There is no provider {min(unknown)} in api.vendordata_providers: choose from StaticJSON, DynamicJSON."
        )
    targets = settings.vendordata_dynamic_targets if vendordata.DYNAMIC in providers else ()
    return vendordata.VendorDataSource(
        static=vendordata.read_static(settings.vendordata_jsonfile_path) if vendordata.STATIC in providers else None,
        targets=vendordata.parse_targets(targets),
        connect_timeout=settings.vendordata_dynamic_connect_timeout,
        read_timeout=settings.vendordata_dynamic_read_timeout,
        fatal=settings.vendordata_dynamic_failure_fatal,
        certificate=settings.vendordata_dynamic_ssl_certfile,
    )
