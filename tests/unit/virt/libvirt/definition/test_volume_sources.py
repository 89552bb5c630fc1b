"""How libvirt is told where the data of a volume is, by the kind of its connection."""

import pytest

from micronova.objects.volume import AttachedVolume, Connection, ISCSIConnection, NBDConnection, RBDConnection
from micronova.virt.libvirt.client.xmltree import unparse
from micronova.virt.libvirt.definition import device_xml
from micronova.virt.libvirt.definition.volumes import secret_of, volume_source


def attached(connection: Connection) -> AttachedVolume:
    return AttachedVolume(
        volume_id="v", attachment_id="a", device_uuid="d", device_name="/dev/vdb", connection=connection
    )


SECRET = secret_of(attached(NBDConnection(export_name="e")))


@pytest.mark.parametrize(
    ("connection", "wanted"),
    [
        (
            NBDConnection(export_name="e", socket_path="/s"),
            '<source protocol="nbd" name="e"><host transport="unix" socket="/s"/></source>',
        ),
        (
            NBDConnection(export_name="e", host="h", port=1, encrypted=True),
            '<source protocol="nbd" name="e"><host name="h" port="1"/><encryption format="luks">'
            f'<secret type="passphrase" uuid="{SECRET}"/></encryption></source>',
        ),
        (
            RBDConnection(name="pool/v", hosts=("m1", "m2"), ports=("6789", 6790)),
            '<source protocol="rbd" name="pool/v"><host name="m1" port="6789"/><host name="m2" port="6790"/></source>',
        ),
        (
            RBDConnection(name="pool/v", auth_enabled=True, auth_username="cinder", secret_uuid="s"),
            '<source protocol="rbd" name="pool/v"><auth username="cinder"><secret type="ceph" uuid="s"/></auth>'
            "</source>",
        ),
        (
            ISCSIConnection(target_iqn="iqn.t", target_portal="[::1]:3260", target_lun=1, initiator="iqn.h"),
            '<source protocol="iscsi" name="iqn.t/1"><host name="::1" port="3260"/>'
            '<initiator><iqn name="iqn.h"/></initiator></source>',
        ),
        (
            ISCSIConnection(target_iqn="iqn.t", target_portal="h:1", auth_username="u", initiator="iqn.h"),
            '<source protocol="iscsi" name="iqn.t/0"><host name="h" port="1"/>'
            f'<auth username="u"><secret type="iscsi" uuid="{SECRET}"/></auth>'
            '<initiator><iqn name="iqn.h"/></initiator></source>',
        ),
    ],
)
def test_the_source_of_a_volume(connection: Connection, wanted: str) -> None:
    made = unparse(device_xml.volume_source(volume_source(attached(connection))))
    assert "".join(line.strip() for line in made.splitlines()).replace(" />", "/>") == wanted
