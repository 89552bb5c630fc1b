"""The files of a config drive."""

from micronova.metadata import ec2, openstack
from micronova.metadata.facts import Facts, VendorData

EC2_VERSIONS = ("2009-04-04", ec2.LATEST)  # guests that read config drives do not use older ones


def files(facts: Facts, vendor_data: VendorData, seed: bytes) -> dict[str, bytes]:
    """Return all files by their paths."""
    found: dict[str, bytes] = {}
    static = vendor_data.static is not None
    for version in (*openstack.VERSIONS, openstack.LATEST):
        for name in openstack.names(facts, version, static_vendor_data=static):
            found[f"openstack/{version}/{name}"] = openstack.document(facts, version, name, vendor_data, seed)
    for number, file in enumerate(facts.injected_files):
        found[f"openstack/{openstack.content_path(number)}"] = file.contents
    user_data = openstack.decoded(facts.instance.user_data)
    for version in EC2_VERSIONS:
        found[f"ec2/{version}/meta-data.json"] = openstack.as_json(ec2.meta_data(facts, version))
        if user_data is not None:
            found[f"ec2/{version}/user-data"] = user_data
    return found
