"""Reading settings."""

import re
import tomllib
from pathlib import Path

import pytest

from micronova.cli.maintain import show_settings
from micronova.conf.settings import HIDDEN, Settings, SettingsError, example, is_secret, load, options, shown


def _load(tmp_path: Path, text: str) -> dict[str, tuple[tuple[str, ...], str, int | None]]:
    file = tmp_path / "micronova.toml"
    file.write_text(text)
    devices = load(file, {}).devices
    assert devices.enabled_mdev_types == ("nvidia-35", "i915-GVTg_V5_4")
    return {name: (each.device_addresses, each.mdev_class, each.max_instances) for name, each in devices.mdev.items()}


def test_each_type_of_mediated_devices_may_have_a_section(tmp_path: Path) -> None:
    """As in Nova; the order of the sections does not matter, and names of types have capital letters."""
    sections = """
        [mdev_i915-GVTg_V5_4]
        device_addresses = ["0000:86:00.0"]
        mdev_class = "CUSTOM_ENCODER"

        [devices]
        enabled_mdev_types = ["nvidia-35", "i915-GVTg_V5_4"]
        mdev = { nvidia-35 = { max_instances = 8 } }
    """
    assert _load(tmp_path, sections) == {
        "nvidia-35": ((), "VGPU", 8),
        "i915-GVTg_V5_4": (("0000:86:00.0",), "CUSTOM_ENCODER", None),
    }


@pytest.mark.parametrize("line", ["max_instances = 0", 'addresses = ["0000:86:00.0"]'])
def test_a_wrong_section_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "micronova.toml"
    file.write_text(f'[devices]\nenabled_mdev_types = ["nvidia-35"]\n[mdev_nvidia-35]\n{line}\n')
    with pytest.raises(SettingsError, match=r"devices\.mdev"):
        load(file, {})


def test_settings_that_are_shown_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "micronova.toml"
    file.write_text(
        'pci.alias = [{ name = "gpu", vendor_id = "10de", product_id = "1eb8" }]\n'
        '[devices]\nenabled_mdev_types = ["nvidia-35"]\n[mdev_nvidia-35]\ndevice_addresses = ["0000:84:00.0"]\n'
    )
    show_settings(file)
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    assert load(again, {}) == load(file, {})
    assert load(again, {}).pci.alias[0]["name"] == "gpu"


def test_settings_of_cpus_and_pages_are_where_nova_has_them(tmp_path: Path) -> None:
    """Earlier versions had them in the section of the driver, which still works."""
    pages = [{"node": 0, "size": 2048, "count": 64}]
    new = load(
        None, {}, compute={"cpu_shared_set": "0-1", "cpu_dedicated_set": "2-3"}, default={"reserved_huge_pages": pages}
    )
    moved = {"cpu_shared_set": "0-1", "cpu_dedicated_set": "2-3", "reserved_huge_pages": pages}
    assert load(None, {}, libvirt=moved) == new
    assert new.compute.cpu_dedicated_set == "2-3" and new.default.reserved_huge_pages == tuple(pages)
    assert load(None, {"MICRONOVA__LIBVIRT__CPU_SHARED_SET": "0"}).compute.cpu_shared_set == "0"
    file = tmp_path / "both.toml"
    file.write_text("reserved_huge_pages = []\n[libvirt]\nreserved_huge_pages = []\n")
    with pytest.raises(SettingsError, match=r"set default\.reserved_huge_pages only"):
        load(file, {})
    listed = {name for name, *_ in options()}
    assert "compute.cpu_shared_set" in listed and "libvirt.cpu_shared_set" not in listed


def _said(tmp_path: Path, text: str) -> str:
    file = tmp_path / "micronova.toml"
    file.write_text(text)
    with pytest.raises(SettingsError) as refused:
        load(file, {})
    return refused.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[novaa]\nx = 1", ["There is no section novaa (did you mean nova?)."]),
        ("[api]\nprot = 1", ["There is no setting api.prot (did you mean port?)."]),
        ("[api]\nport = 99999", ["api.port is 99999, and right is a whole number from 0 to 65535. "]),
        ('[api]\nport = "many"', ['api.port is "many", and right is a whole number']),
        ("[api]\nworkers = 0", ["api.workers is 0, and right is a whole number of at least 1. "]),
        ('[api]\nauth_strategy = "none"', ['api.auth_strategy is "none", and right is one of "keystone", "noauth2". ']),
        ('[libvirt]\nimages_type = "lvm"', ['libvirt.images_type is "lvm", and right is one of "qcow2", "raw". ']),
        ('[conductor]\nrequire_host_users = "maybe"', ["conductor.require_host_users", "true or false"]),
        ('[api]\ntrusted_proxies = 7', ["api.trusted_proxies is 7, and right is a list, such as"]),
        ('[metrics]\nweight_setting = ["cpu"]', ["metrics.weight_setting", '["cpu.percent=-1.0"]']),
        ('default = 1', ["There is no setting default.default"]),
        ('[default]\nsecret_key = "abc"', ["default.secret_key is \"********\"", "openssl rand -hex 32"]),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named_with_what_would_be_right(tmp_path: Path, text: str, words: list[str]) -> None:
    said = _said(tmp_path, text)
    assert all(word in said for word in words), said
    assert "regex" not in said and "Expected" not in said and "`$" not in said


# Words that stand for something that a reader of one description cannot see; the noun is better.
_VAGUE = re.compile(r"\b(they|whom|whose own|its own|theirs)\b|^(Its|Their|They|It)\b|\b(of|for) (it|them)\b(?! to)")
_WHEN = re.compile(r"\b(Set|set|Raise|Lower|Change|Turn|Switch|Name|Keep)\b|is for development|is a good number")


@pytest.mark.parametrize("name", [name for name, *_ in options()])
def test_a_setting_is_described(name: str) -> None:
    """What it does, an example, when to change it; seconds, bytes and the like are named."""
    [(_, default, description, kind)] = [each for each in options() if each[0] == name]
    assert description[:1].isupper() and description.endswith(".") and len(description) > 30, description
    assert not description.startswith(("Of ", "For ", "If ")), description
    assert _WHEN.search(description), f"when is {name} changed? {description}"
    if default in ("", None, (), {}) or kind == bool | None:
        assert example(name) not in (None, "", [], {}), f"{name} has no default that shows a value"
    if isinstance(default, float) and "multiplier" not in name and "ratio" not in name and "weight" not in name:
        assert "Seconds" in description, f"{name} has no unit: {description}"


def test_descriptions_name_what_they_are_about() -> None:
    found = {name: _VAGUE.search(description) for name, _, description, _ in options()}
    assert {name: match[0] for name, match in found.items() if match} == {}


def test_an_example_of_a_url_is_that_of_its_service() -> None:
    words = {"glance": "image", "neutron": "network", "cinder": "volume", "nova": "compute", "placement": "placement"}
    for section, word in words.items():
        assert word in example(f"{section}.public_endpoint") and word in example(f"{section}.endpoint_override"), (
            section
        )


def test_defaults_are_printed_as_comments(capsys: pytest.CaptureFixture[str]) -> None:
    show_settings(None)
    lines = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith(("#", "["))]
    assert lines == []


def test_examples_are_values_of_their_settings() -> None:
    """Except those that describe a secret or a key in words."""
    for name, *_ in options():
        given = example(name)
        if given is None or (isinstance(given, str) and " " in given):
            continue
        section, _, option = name.partition(".")
        assert load(None, {}, **{section: {option: given}}) != Settings(), name


def test_secrets_are_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "micronova.toml"
    file.write_text(
        f'[default]\nsecret_key = "{"5a" * 32}"\ntransport_url = "amqp://nova:hush/1@one,two/v"\n'
        '[database]\nconnection = "postgresql://nova:h@sh@db/nova"\n[identity]\npassword = "whisper"\n'
        f'[glance]\nticket_key = "{"6b" * 32}"\n[neutron]\nmetadata_proxy_shared_secret = "murmur"\n'
    )
    show_settings(file)
    said = capsys.readouterr().out
    for secret in ("5a5a", "hush", "h@sh", "whisper", "6b6b", "murmur"):
        assert secret not in said
    assert "amqp://nova:********@one,two/v" in said and "postgresql://nova:********@db/nova" in said
    tomllib.loads(said)
    show_settings(file, secrets=True)
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    assert load(again, {}) == load(file, {})


def test_every_password_and_key_is_marked_as_a_secret() -> None:
    named = {name for name, *_ in options() if re.search(r"(\.password|secret|_key)$", name)}
    assert {name for name in named if not is_secret(name)} == {
        "api.tls_key",  # a file
        "identity.public_key",
    }
    assert shown("identity.password", "") == "" and shown("identity.password", "x") == HIDDEN
    assert shown("identity.password", 12345678) == HIDDEN and shown("identity.password", ["x"]) == HIDDEN
    assert shown("api.port", 8774) == 8774


@pytest.mark.parametrize("value", ["12345678", "[12345678]", "{ value = 12345678 }"])
def test_an_error_does_not_show_a_secret(tmp_path: Path, value: str) -> None:
    file = tmp_path / "micronova.toml"
    file.write_text(f"[identity]\npassword = {value}\n")
    with pytest.raises(SettingsError) as caught:
        load(file, {})
    assert "12345678" not in str(caught.value) and f'identity.password is "{HIDDEN}"' in str(caught.value)


def test_a_password_in_the_query_of_a_url_is_hidden() -> None:
    name = "database.connection"
    assert shown(name, "postgresql://u@h/db?password=h@sh&sslmode=require") == (
        "postgresql://u@h/db?password=********&sslmode=require"
    )
    assert shown(name, "postgresql://u:a@h/db?x=y&password=h@sh") == (
        "postgresql://u:********@h/db?x=y&password=********"
    )
