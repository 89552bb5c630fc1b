"""`micronova ssh` into a real guest, as a plain member who has made nothing but a key pair and a server."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command import micronova
from tests.e2e.cloud import RealCloud
from tests.e2e.guests import Tenant, run, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]


async def test_it_makes_what_is_missing_and_says_how_to_undo_it(cloud: RealCloud, tmp_path: Path) -> None:
    keys = yaml.safe_load((cloud.directory / "clouds.yaml").read_text())["clouds"]["micronova-demo"]["auth"]
    person = await cloud.login(keys["username"], keys["password"], keys["project_name"])
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    key = home / ".ssh" / "mine"
    await run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    public = key.with_suffix(".pub").read_text()
    await person.make("/compute/v2.1/os-keypairs", "keypair", name="ssh-mine", public_key=public, type="ssh")
    [network] = (await person.do("GET", "/network/v2.0/networks?name=private"))["networks"]
    tenant = Tenant(cloud, person, key, network=network)
    guest = await tenant.boot("ssh-guest", key_name="ssh-mine")
    await guest.wait("ACTIVE")

    # HOME is not enough for ssh itself, which asks the password database: the key is named to it.
    env = {"HOME": str(home), "OS_CLIENT_CONFIG_FILE": "", "OS_CLOUD": "", "MICRONOVA_DIR": str(cloud.directory)}

    def ssh(*arguments: str) -> Any:
        return micronova("ssh", *arguments, env=env, timeout=300)

    async def changed() -> tuple[int, int]:
        rules = (await person.do("GET", "/network/v2.0/security-group-rules"))["security_group_rules"]
        addresses = (await person.do("GET", "/network/v2.0/floatingips"))["floatingips"]
        return len(rules), len(addresses)

    before = await changed()
    refused = ssh("ssh-guest", "--", "hostname")
    assert refused.returncode == 1 and "Nothing was changed" in refused.stderr, refused
    assert "let TCP port 22 in" in refused.stderr and "make a floating IP in network public" in refused.stderr
    assert await changed() == before

    done = ssh("ssh-guest", "--yes", "--", "hostname; echo $((6 * 7))")
    assert (done.returncode, done.stdout.split()) == (0, ["ssh-guest", "42"]), done
    assert await changed() == (before[0] + 1, before[1] + 1)
    again = ssh("ssh-guest", "--", "exit 3")
    assert again.returncode == 3 and "undo" not in again.stderr, again

    # What it says undoes it.
    undo = [line.split("undo: ")[1].split() for line in done.stderr.splitlines() if "undo: " in line]
    assert [words[:-1] for words in undo] == [
        ["openstack", "security", "group", "rule", "delete"],
        ["openstack", "floating", "ip", "delete"],
    ]
    await person.do("DELETE", f"/network/v2.0/security-group-rules/{undo[0][-1]}")

    async def closed() -> Any:
        """The firewall of the host follows the service; until then the guest answers."""
        tried = micronova("connect", undo[1][-1], "22", env=env)
        return tried if tried.returncode else None

    silent = await until(closed, "port 22 to be closed")
    assert silent.returncode == 1 and "security group rule create" in silent.stderr, silent
    found = await person.do("GET", f"/network/v2.0/floatingips?floating_ip_address={undo[1][-1]}")
    await person.do("DELETE", f"/network/v2.0/floatingips/{found['floatingips'][0]['id']}")
    assert await changed() == before
    await guest.delete()
    await person.do("DELETE", "/compute/v2.1/os-keypairs/ssh-mine")
