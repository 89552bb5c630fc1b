"""`micronova ssh` asks before it changes anything, and knows when nothing has to be changed."""

import io
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from micronova.cli import ssh
from micronova.cli.ssh import Change, carry_out, checked_address, lets_ssh_in, private_key_of, ssh_arguments
from micronova.cli.state import StateDirectory
from micronova.cli.user_session import open_session, session_of_environment
from micronova.objects.errors import MicronovaError

OPEN: dict[str, Any] = {
    "direction": "ingress",
    "ethertype": "IPv4",
    "remote_group_id": None,
    "remote_ip_prefix": None,
    "protocol": "tcp",
    "port_range_min": 22,
    "port_range_max": 22,
}


@pytest.mark.parametrize(
    ("rule", "enough"),
    [
        ({}, True),
        ({"remote_ip_prefix": "0.0.0.0/0"}, True),
        ({"protocol": None, "port_range_min": None, "port_range_max": None}, True),
        ({"port_range_min": 1, "port_range_max": 1024}, True),
        ({"direction": "egress"}, False),
        ({"ethertype": "IPv6"}, False),
        ({"remote_group_id": "g"}, False),
        ({"remote_ip_prefix": "10.0.0.0/24"}, False),
        ({"protocol": "udp"}, False),
        ({"port_range_min": 80, "port_range_max": 80}, False),
    ],
)
def test_which_rules_let_ssh_in(rule: dict[str, Any], enough: bool) -> None:
    assert lets_ssh_in({**OPEN, **rule}) is enough


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def change(done: list[str]) -> Change:
    async def make() -> str:
        done.append("made")
        return "openstack undo it"

    return Change("make something", make)


async def test_without_a_terminal_nothing_is_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(MicronovaError, match=r"Nothing was changed.*--yes"):
        await carry_out([change(done)], yes=False)
    assert done == [] and "make something" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "made"), [("n\n", []), ("\n", []), ("y\n", ["made"])])
async def test_it_does_what_the_person_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, made: list[str]
) -> None:
    done: list[str] = []
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(click.termui, "visible_prompt_func", lambda _: answer.strip())
    if made:
        await carry_out([change(done)], yes=False)
        assert "undo: openstack undo it" in capsys.readouterr().err
    else:
        with pytest.raises(MicronovaError, match="Nothing was changed"):
            await carry_out([change(done)], yes=False)
    assert done == made


async def test_yes_skips_the_question_and_still_says_how_to_undo(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    await carry_out([change(done)], yes=True)
    said = capsys.readouterr()
    assert done == ["made"] and said.out == ""
    assert said.err == "done: make something\n  undo: openstack undo it\n"
    await carry_out([], yes=False)
    assert capsys.readouterr().err == ""


async def test_names_cannot_write_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def make() -> str:
        return "openstack undo \x1b]0;x\x07"

    hostile = Change("open group \x1b[2Kweb\r\nnothing", make)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(MicronovaError):
        await carry_out([hostile], yes=False)
    await carry_out([hostile], yes=True)
    said = capsys.readouterr().err
    assert all(character.isprintable() or character == "\n" for character in said)
    assert said.count(r"  open group \x1b[2Kweb\r\nnothing") == 1 and len(said.splitlines()) == 4


def _options(arguments: list[str]) -> list[str]:
    return [value for option, value in itertools.pairwise(arguments) if option == "-o"]


def test_the_guest_gets_no_agent_no_display_and_no_other_key() -> None:
    proxy = ["python", "50%", "connect"]
    with_key = ssh_arguments(proxy, Path("/k"), "cirros", "10.0.0.5", ("ls", "-l"))
    assert with_key[-5:] == ["-i", "/k", "cirros@10.0.0.5", "ls", "-l"]
    assert {"ForwardAgent=no", "ForwardX11=no", "IdentitiesOnly=yes"} <= set(_options(with_key))
    without = ssh_arguments(proxy, None, "cirros", "10.0.0.5", ())
    assert {"ForwardAgent=no", "ForwardX11=no"} <= set(_options(without))
    assert "IdentitiesOnly=yes" not in _options(without), "only the agent has the key"


@pytest.mark.parametrize(
    "text", ["-oProxyCommand=x", "10.0.0.5; x", "$(x)", "fe80::1%;x", "guest.example", "", "10.0.0.5\n"]
)
def test_only_an_address_gets_into_a_command_line(text: str) -> None:
    assert checked_address({"id": "f", "floating_ip_address": "10.0.0.5"}) == "10.0.0.5"
    with pytest.raises(MicronovaError, match="no IPv4 address"):
        checked_address({"id": "f", "floating_ip_address": text})


def test_the_private_key_is_found_by_its_public_key(tmp_path: Path) -> None:
    for name in ("one", "two"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "x", "-f", str(tmp_path / name)]
        subprocess.run(command, check=True)
    (tmp_path / "known_hosts").write_text("nothing\n")
    public = (tmp_path / "two.pub").read_text()
    assert private_key_of(public, sorted(tmp_path.iterdir())) == tmp_path / "two"
    (tmp_path / "two.pub").unlink()
    other_comment = " ".join([*public.split()[:2], "somebody@elsewhere"])
    assert private_key_of(other_comment, sorted(tmp_path.iterdir())) == tmp_path / "two"
    (tmp_path / "two").unlink()
    assert private_key_of(public, sorted(tmp_path.iterdir())) is None


def test_the_api_and_the_connection_are_of_one_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = StateDirectory(tmp_path / "cloud")
    place.create()
    place.write_clouds("http://127.0.0.1:8774", place.keys(), "RegionOne")
    other = tmp_path / "other.yaml"
    monkeypatch.setenv("OS_CLIENT_CONFIG_FILE", str(other))
    monkeypatch.setenv("OS_CLOUD", "mine")
    auth = "auth: {{auth_url: {}, username: n, project_name: p, password: x}}"
    other.write_text(f"clouds: {{mine: {{{auth.format('http://127.0.0.1:8774/identity/')}}}}}")
    assert session_of_environment(place).auth_url == "http://127.0.0.1:8774/identity"
    other.write_text(f"clouds: {{mine: {{{auth.format('https://elsewhere.example/identity/v3')}}}}}")
    with pytest.raises(
        MicronovaError, match=r"elsewhere\.example/identity, but .*cloud has the one at http://127\.0\.0\.1"
    ):
        session_of_environment(place)
    (place.path / "clouds.yaml").unlink()
    with pytest.raises(MicronovaError, match=r"Cannot read .*cloud/clouds\.yaml"):
        session_of_environment(place)


def test_a_clouds_yaml_that_does_not_help_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "clouds.yaml"
    with pytest.raises(MicronovaError, match="MICRONOVA_DIR"):
        open_session(file, "mine")
    file.write_text("- nothing")
    with pytest.raises(MicronovaError, match=r"is not a clouds\.yaml"):
        open_session(file, "mine")
    file.write_text("clouds: {micronova-demo: {auth: {auth_url: u, username: n, project_name: p}}}")
    monkeypatch.delenv("OS_CLIENT_CONFIG_FILE", raising=False)
    monkeypatch.setenv("OS_CLOUD", "mine")
    with pytest.raises(MicronovaError, match="no cloud mine: set OS_CLOUD to one of micronova-demo"):
        session_of_environment(StateDirectory(tmp_path))
    monkeypatch.delenv("OS_CLOUD")
    with pytest.raises(MicronovaError, match="has no password"):
        session_of_environment(StateDirectory(tmp_path))


def test_of_what_a_guest_sends_little_is_read() -> None:
    """A guest may send without end on the port of SSH."""
    assert ssh._first_of(["yes"], 0.5) is None
    found = ssh._first_of(["sh", "-c", "yes | head -c 50000; yes no | head -c 50000 >&2"], 20.0)
    assert found is not None
    assert [len(each) for each in found] == [ssh.MOST_READ] * 2
    assert ssh._first_of(["sh", "-c", "echo SSH-2.0; echo why >&2"], 20.0) == (b"SSH-2.0\n", b"why\n")
    with pytest.raises(MicronovaError, match="no sudo"):
        ssh._first_of(["/nowhere/sudo"], 1.0)
