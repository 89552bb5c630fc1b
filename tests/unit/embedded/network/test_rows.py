"""The types of rows say what is in the tables."""

from typing import Any, get_type_hints

import pytest
import sqlalchemy as sa

from micronova.embedded.network import row_types, rows, tables
from micronova.embedded.network.collection import Collection
from micronova.embedded.network.ports import Ports
from micronova.embedded.network.security_group_rules import SecurityGroupRules
from micronova.embedded.network.subnets import Subnets

TYPES: list[tuple[type, sa.Table]] = [
    (row_types.PolicyRow, tables.qos_policies),
    (row_types.BandwidthLimitRow, tables.bandwidth_limit_rules),
    (row_types.NetworkRow, tables.networks),
    (row_types.SubnetPoolRow, tables.subnetpools),
    (row_types.SubnetRow, tables.subnets),
    (row_types.PortRow, tables.ports),
    (row_types.SecurityGroupRow, tables.security_groups),
    (row_types.RuleRow, tables.security_group_rules),
    (row_types.RouterRow, tables.routers),
    (row_types.FloatingIPRow, tables.floatingips),
    (row_types.AgentRow, tables.agents),
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
        (row_types.SubnetOnNetworkRow, Subnets),
        (row_types.PortOnNetworkRow, Ports),
        (row_types.RuleOfGroupRow, SecurityGroupRules),
    ],
)
def test_a_row_of_a_join_has_the_columns_of_its_statement(row: type, collection: type[Collection[Any]]) -> None:
    selected = collection.select(object.__new__(collection))  # the statement needs nothing of the service
    assert set(get_type_hints(row)) == {column.name for column in selected.selected_columns}


def test_changes_of_a_port_have_the_types_of_its_row() -> None:
    row, changes = get_type_hints(row_types.PortRow), get_type_hints(row_types.PortChanges)
    assert changes == {name: row[name] for name in changes}


def test_a_row_of_a_port_on_its_network_has_the_types_of_its_row() -> None:
    row, network_part_of = get_type_hints(row_types.PortRow), get_type_hints(row_types.PortOnNetworkRow)
    labels = get_type_hints(row_types.NetworkOfRow)
    assert network_part_of == {**row, **labels}


NEW_ROWS: list[tuple[type, type]] = [
    (rows.NewPolicy, row_types.PolicyRow),
    (rows.NewNetwork, row_types.NetworkRow),
    (rows.NewSubnetPool, row_types.SubnetPoolRow),
    (rows.NewSubnet, row_types.SubnetRow),
    (rows.NewSecurityGroup, row_types.SecurityGroupRow),
    (rows.NewRule, row_types.RuleRow),
    (rows.NewRouter, row_types.RouterRow),
    (rows.NewFloatingIP, row_types.FloatingIPRow),
]


@pytest.mark.parametrize(("new", "row"), NEW_ROWS)
def test_a_new_row_has_the_columns_and_types_of_a_row(new: type, row: type) -> None:
    assert get_type_hints(new) == get_type_hints(row)
