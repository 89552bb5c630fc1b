"""A policy file whose rules cannot have the effect that its author wants is refused, with what would be right."""

from pathlib import Path

import pytest

from micronova.policies import compute, placement
from micronova.policies.enforcer import Enforcer, PolicyFileError

CREATE = "os_compute_api:servers:create"


def _refused(tmp_path: Path, text: str) -> str:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(PolicyFileError) as refused:
        Enforcer(compute.RULES, file)
    assert str(file) in refused.value.message
    return refused.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"os_compute_api:servers:creat": "role:member"', "there is no rule os_compute_api:servers:creat"),
        ('"os_compute_api:servers:creat": "role:member"', f"did you mean {CREATE}?"),
        (f'"{CREATE}": "role:member or"', f"the check of {CREATE} cannot be understood: 'role:member or'"),
        (f'"{CREATE}": "role:member or member"', f"the check of {CREATE} cannot be understood"),
        (f'"{CREATE}": "rule:admin_onwer"', f"{CREATE} refers to rule:admin_onwer, which does not exist"),
        (f'"{CREATE}": "rolee:member"', "compares rolee, which no token has (did you mean role?)"),
        (f'"{CREATE}": "rule:a"\n"a": "rule:b"\n"b": "not rule:a"', "a refers to itself"),
        ("- role:member", "does not give rules by name in YAML"),
        ("a: [", "does not give rules by name in YAML"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, said: str) -> None:
    assert said in _refused(tmp_path, text)


def test_all_mistakes_are_named_at_once(tmp_path: Path) -> None:
    said = _refused(tmp_path, '"servers:x": "!"\n"servers:y": "!"')
    assert "servers:x" in said and "servers:y" in said


@pytest.mark.parametrize(
    "text",
    [
        "",
        f'"{CREATE}": "!"',
        f'"{CREATE}": ""',
        f'"{CREATE}": "rule:mine"\n"mine": "role:a and (not role:b or is_admin:True)"',
        f'"{CREATE}": "project_id:%(project_id)s or user_id:1234 or \'x\':%(visibility)s or http://host/x"',
        '"context_is_admin": "role:boss"',
    ],
)
def test_files_without_a_mistake(tmp_path: Path, text: str) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    Enforcer(compute.RULES, file)


def test_the_defaults_have_no_mistake(tmp_path: Path) -> None:
    for rules in (compute.RULES, placement.RULES):
        file = tmp_path / "policy.yaml"
        file.write_text("\n".join(f'"{rule.name}": "{rule.check}"' for rule in rules))
        Enforcer(rules, file)
