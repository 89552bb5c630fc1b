"""Every policy rule that a policy.yaml may name is asked by a service, or listed here with the reason why not."""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import micronova
from micronova.policies import compute, identity, image, network, volume
from micronova.policies.enforcer import Rule
from tests.functional.full_cloud import FullCloud, full_cloud

__all__ = ["full_cloud"]

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOURCE = Path(micronova.__file__).parent
SERVICES = {
    "compute": (compute.RULES, ("api", "servers", "conductor")),
    "identity": (identity.RULES, ("embedded/identity",)),
    "image": (image.RULES, ("embedded/image",)),
    "network": (network.RULES, ("embedded/network",)),
    "volume": (volume.RULES, ("embedded/volume",)),
}
# Rules that a policy.yaml may name as in OpenStack, and why nothing asks them.
NOT_ASKED = {
    "compute:servers:resize:cross_cell": "a cloud is one cell",
    "os_compute_api:servers:create:attach_volume": "there is no volume service",
    "metadef_default": "the default of the other rules of metadata definitions",
    "modify_task": "no request changes tasks",
}


def _rules_of_other_rules(rules: Sequence[Rule]) -> set[str]:
    """Return the rules that others name in their checks."""
    return {name for rule in rules for name in re.findall(r"rule:([\w:-]+)", rule.check)}


def _names(parsed: ast.Module) -> dict[str, str]:
    """Return the strings that names of a module or of its functions stand for."""
    found: dict[str, str] = {}
    for node in ast.walk(parsed):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        [target] = node.targets
        pairs = (
            zip(target.elts, node.value.elts, strict=False)
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            else [(target, node.value)]
        )
        for name, value in pairs:
            if isinstance(name, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[name.id] = value.value
    return found


def _texts(parsed: ast.Module) -> Iterator[str]:
    """Return the strings of a module as patterns; what only a run can fill in matches one word."""
    names = _names(parsed)
    for node in ast.walk(parsed):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.escape(node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                re.escape(names[part.value.id])
                if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name) and part.value.id in names
                else r"[\w-]+"
                if isinstance(part, ast.FormattedValue)
                else re.escape(str(part.value))
                for part in node.values
                if isinstance(part, ast.FormattedValue | ast.Constant)
            )


@pytest.mark.parametrize("service", SERVICES)
async def test_every_rule_is_asked(full_cloud: FullCloud, service: str) -> None:
    rules, packages = SERVICES[service]
    asked = {route.policy for _, route in full_cloud.routes()} | _rules_of_other_rules(rules)
    patterns = {
        text
        for package in packages
        for path in (SOURCE / package).rglob("*.py")
        for text in _texts(ast.parse(path.read_text()))
        if ":" in text or "_" in text
    }
    literal = {re.sub(r"\\(.)", r"\1", text) for text in patterns}
    open_ended = [re.compile(text) for text in patterns if r"[\w-]+" in text and len(text) > 12]
    if service == "network":  # `Collection` asks the rule of each attribute that a body has
        asked |= {rule.name for rule in rules if rule.name.split(":")[0] in asked}
    missing = {
        rule.name
        for rule in rules
        if rule.name not in asked | literal and not any(each.fullmatch(rule.name) for each in open_ended)
    }
    assert missing == {name for name in NOT_ASKED if name in {rule.name for rule in rules}}
