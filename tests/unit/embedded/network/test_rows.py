"""The types of rows say what is in the tables."""

import re
from typing import Any, get_type_hints

import pytest
import sqlalchemy as sa

from micronova.embedded.network import row_types, rows, tables
from micronova.embedded.network.collection import Collection
from micronova.embedded.network.ports import Ports
from micronova.embedded.network.security_group_rules import SecurityGroupRules
from micronova.embedded.network.subnets import Subnets

TYPES: list[tuple[type, sa.Table]] = [
    (row_types.QosPolicyRow, tables.qos_policies),
    (row_types.BandwidthLimitRow, tables.bandwidth_limit_rules),
    (row_types.DscpMarkingRow, tables.dscp_marking_rules),
    (row_types.MinimumBandwidthRow, tables.minimum_bandwidth_rules),
    (row_types.NetworkRow, tables.networks),
    (row_types.AddressScopeRow, tables.address_scopes),
    (row_types.SubnetPoolRow, tables.subnetpools),
    (row_types.SubnetRow, tables.subnets),
    (row_types.PortRow, tables.ports),
    (row_types.SecurityGroupRow, tables.security_groups),
    (row_types.SecurityGroupRuleRow, tables.security_group_rules),
    (row_types.DefaultSecurityGroupRuleRow, tables.default_security_group_rules),
    (row_types.RouterRow, tables.routers),
    (row_types.TrunkRow, tables.trunks),
    (row_types.SubportRow, tables.subports),
    (row_types.FloatingIPRow, tables.floatingips),
    (row_types.RbacPolicyRow, tables.rbac_policies),
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
    row, joined = get_type_hints(row_types.PortRow), get_type_hints(row_types.PortOnNetworkRow)
    labels = get_type_hints(row_types.NetworkOfRow)
    assert joined == {**row, **labels}


NEW_ROWS = {name.removeprefix("New"): each for name, each in vars(rows).items() if name.startswith("New")}


@pytest.mark.parametrize("name", NEW_ROWS)
def test_a_new_row_has_the_columns_and_types_of_a_row(name: str) -> None:
    row = getattr(row_types, f"{name}Row")
    assert row in [each for each, _ in TYPES], "it has to be compared with its table"
    assert get_type_hints(NEW_ROWS[name]) == get_type_hints(row)


def test_every_type_of_a_whole_row_is_compared_with_its_table() -> None:
    types = {each for each in vars(row_types).values() if isinstance(each, type) and each.__doc__}
    whole = {each for each in types if re.fullmatch(r"A row of `\w+`\.", each.__doc__ or "")}
    assert whole == {row for row, _ in TYPES}
