"""The types of rows say what is in the tables."""

from typing import Any, get_type_hints

import pytest
import sqlalchemy as sa

from micronova.embedded.network import rows, tables
from micronova.embedded.network.collection import Collection
from micronova.embedded.network.ports import Ports
from micronova.embedded.network.security_group_rules import SecurityGroupRules
from micronova.embedded.network.subnets import Subnets

TYPES: list[tuple[type, sa.Table]] = [
    (tables.PolicyRow, tables.qos_policies),
    (tables.BandwidthLimitRow, tables.bandwidth_limit_rules),
    (tables.NetworkRow, tables.networks),
    (tables.SubnetPoolRow, tables.subnetpools),
    (tables.SubnetRow, tables.subnets),
    (tables.PortRow, tables.ports),
    (tables.SecurityGroupRow, tables.security_groups),
    (tables.RuleRow, tables.security_group_rules),
    (tables.RouterRow, tables.routers),
    (tables.FloatingIPRow, tables.floatingips),
    (tables.AgentRow, tables.agents),
]


@pytest.mark.parametrize(("row", "table"), TYPES)
def test_a_row_has_the_columns_of_its_table(row: type, table: sa.Table) -> None:
    hints = get_type_hints(row)
    assert set(hints) == {column.name for column in table.columns}
    for column in table.columns:
        assert (type(None) in getattr(hints[column.name], "__args__", ())) == column.nullable, column.name
        if not isinstance(column.type, tables.Document):
            plain = column.type.python_type
            assert hints[column.name] in (plain, plain | None), column.name


@pytest.mark.parametrize(
    ("row", "collection"),
    [
        (tables.SubnetOnNetworkRow, Subnets),
        (tables.PortOnNetworkRow, Ports),
        (tables.RuleOfGroupRow, SecurityGroupRules),
    ],
)
def test_a_row_of_a_join_has_the_columns_of_its_statement(row: type, collection: type[Collection[Any]]) -> None:
    selected = collection.select(object.__new__(collection))  # the statement needs nothing of the service
    assert set(get_type_hints(row)) == {column.name for column in selected.selected_columns}


def test_changes_of_a_port_have_the_types_of_its_row() -> None:
    row, changes = get_type_hints(tables.PortRow), get_type_hints(tables.PortChanges)
    assert changes == {name: row[name] for name in changes}


def test_a_row_of_a_port_on_its_network_has_the_types_of_its_row() -> None:
    row, network_part_of = get_type_hints(tables.PortRow), get_type_hints(tables.PortOnNetworkRow)
    labels = get_type_hints(tables.NetworkOfRow)
    assert network_part_of == {**row, **labels}


NEW_ROWS: list[tuple[type, type]] = [
    (rows.NewPolicy, tables.PolicyRow),
    (rows.NewNetwork, tables.NetworkRow),
    (rows.NewSubnetPool, tables.SubnetPoolRow),
    (rows.NewSubnet, tables.SubnetRow),
    (rows.NewSecurityGroup, tables.SecurityGroupRow),
    (rows.NewRule, tables.RuleRow),
    (rows.NewRouter, tables.RouterRow),
    (rows.NewFloatingIP, tables.FloatingIPRow),
]


@pytest.mark.parametrize(("new", "row"), NEW_ROWS)
def test_a_new_row_has_the_columns_and_types_of_a_row(new: type, row: type) -> None:
    assert get_type_hints(new) == get_type_hints(row)
