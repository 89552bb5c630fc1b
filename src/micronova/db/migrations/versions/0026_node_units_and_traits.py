"""One server gets no more than a whole node has, and nodes have the traits COMPUTE_NODE and COMPUTE_STATUS_DISABLED."""

from alembic import op

revision = "0026"
down_revision = "0025"

_MAX_UNITS = """
    UPDATE inventories SET max_unit = CASE WHEN total < 1 THEN 1 ELSE total END
    WHERE max_unit = 2147483647 AND resource_class IN ('VCPU', 'PCPU', 'MEMORY_MB', 'DISK_GB')
    AND node_uuid IN (SELECT uuid FROM compute_nodes)
"""
_TRAITS = """
    INSERT INTO provider_traits (provider_uuid, trait) SELECT uuid, '{trait}' FROM compute_nodes
    WHERE {condition} NOT EXISTS (
        SELECT 1 FROM provider_traits AS known
        WHERE known.provider_uuid = compute_nodes.uuid AND known.trait = '{trait}'
    )
"""
_DISABLED = "host IN (SELECT host FROM services WHERE \"binary\" = 'nova-compute' AND disabled) AND"


def upgrade() -> None:
    """Write what the next report of each host, and the next change of its service, would write."""
    op.execute(_MAX_UNITS)
    op.execute(_TRAITS.format(trait="COMPUTE_NODE", condition=""))
    op.execute(_TRAITS.format(trait="COMPUTE_STATUS_DISABLED", condition=_DISABLED))
