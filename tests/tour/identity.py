"""The tour of identity: the catalog, domains, projects, users, groups, roles and application credentials."""

from pathlib import Path

from tests.osc import OpenStackClient
from tests.tour.steps import DEMO


def catalog(osc: OpenStackClient) -> None:
    """Where everything is, and how an administrator changes that."""
    assert osc.json("token issue")["project_id"] == osc.json("project show", "admin")["id"]
    assert {"nova", "keystone", "glance", "neutron"} <= set(osc.column("catalog list"))
    assert "/compute/v2.1" in str(osc.json("catalog show", "compute"))
    assert {"compute", "image"} <= set(osc.column("versions show", name="Service Type"))
    assert "os-server-groups" in osc.column("extension list", "--compute", name="Alias")
    assert "security-group" in osc.column("extension list", "--network", name="Alias")
    assert osc.json("extension show", "security-group")["alias"] == "security-group"

    token = osc.json("token issue", cloud=DEMO)["id"]
    by_token = ("--os-auth-url", _auth_url(osc), "--os-auth-type", "v3token", "--os-token", token)
    assert osc.json("token issue", *by_token, cloud="")["user_id"] == osc.json("user show", "demo")["id"]
    osc("token revoke", token)
    refused = osc.refused("token issue", *by_token, cloud="")
    assert "401" in refused or "404" in refused

    assert osc.column("region list", name="Region") == ["RegionOne"]
    osc("region create", "--description", "over there", "RegionTwo")
    osc("region set", "--parent-region", "RegionOne", "RegionTwo")
    shown = osc.json("region show", "RegionTwo")
    assert (shown["description"], shown["parent_region"]) == ("over there", "RegionOne")

    assert "compute" in osc.column("service list", name="Type")
    service = osc.json("service create", "--name", "tour-dns", "dns")["id"]
    osc("service set", "--description", "names", "tour-dns")
    assert osc.json("service show", service)["description"] == "names"
    assert len(osc.json("endpoint list", "--service", "compute")) == 3
    endpoint = osc.json("endpoint create", "--region", "RegionTwo", "tour-dns", "public", "http://127.0.0.1:9")["id"]
    osc("endpoint set", "--url", "http://127.0.0.1:99", endpoint)
    assert osc.json("endpoint show", endpoint)["url"] == "http://127.0.0.1:99"
    assert "tour-dns" in osc.column("catalog list")
    osc("endpoint delete", endpoint)
    osc("service delete", "tour-dns")
    osc("region delete", "RegionTwo")
    assert "tour-dns" not in osc.column("catalog list")


def domains(osc: OpenStackClient) -> None:
    """A domain with a project, a user and a group of its own."""
    assert "Default" in osc.column("domain list")
    domain = osc.json("domain create", "--description", "abroad", "tour-domain")["id"]
    osc("domain set", "--description", "far abroad", "tour-domain")
    assert osc.json("domain show", "tour-domain")["description"] == "far abroad"
    osc("project create", "--domain", "tour-domain", "there")
    assert osc.column("project list", "--domain", "tour-domain") == ["there"]
    osc("user create", "--domain", "tour-domain", "--password", "secret-1", "native")
    osc("role add", "--user", "native", "--domain", domain, "admin")
    assert osc.column("user list", "--domain", "tour-domain") == ["native"]
    [given] = osc.json("role assignment list", "--domain", "tour-domain", "--names")
    assert (given["Role"], given["User"], given["Domain"]) == ("admin", "native@tour-domain", "tour-domain")
    assert "403" in osc.refused("domain delete", "tour-domain")  # it is enabled
    osc("domain set", "--disable", "tour-domain")
    osc("domain delete", "tour-domain")
    assert "tour-domain" not in osc.column("domain list")


def people(osc: OpenStackClient) -> None:
    """A project, its user, what the user may do, and that it can log in."""
    project = osc.json("project create", "--description", "an outing", "tour")["id"]
    osc("project set", "--tag", "fun", "tour")
    assert osc.json("project show", "tour")["tags"] == ["fun"]
    assert "tour" in osc.column("project list")
    osc("user create", "--project", "tour", "--password", "secret-1", "traveller")
    osc("user set", "--email", "t@example.org", "traveller")
    assert osc.json("user show", "traveller")["email"] == "t@example.org"
    assert "traveller" in osc.column("user list")

    assert {"admin", "manager", "member", "reader", "service"} <= set(osc.column("role list"))
    osc("role create", "guide")
    osc("role set", "--name", "pathfinder", "guide")
    assert osc.json("role show", "pathfinder")["name"] == "pathfinder"
    osc("implied role create", "pathfinder", "--implied-role", "reader")
    assert ("pathfinder", "reader") in [
        (row["Prior Role Name"], row["Implied Role Name"]) for row in osc.json("implied role list")
    ]
    osc("implied role delete", "pathfinder", "--implied-role", "reader")
    osc("role add", "--project", "tour", "--user", "traveller", "member")
    [given] = osc.json("role assignment list", "--project", "tour", "--names")
    assert (given["Role"], given["User"]) == ("member", "traveller@Default")

    # The new user logs in with its own password, and sees its own project only.
    def auth(password: str) -> tuple[str, ...]:
        return ("--os-username", "traveller", "--os-password", password, "--os-project-name", "tour")

    assert osc.json("token issue", *auth("secret-1"))["project_id"] == project
    assert osc.column("project list", *auth("secret-1")) == ["tour"]
    osc("user password set", *auth("secret-1"), "--original-password", "secret-1", "--password", "secret-2")
    assert "401" in osc.refused("token issue", *auth("secret-1"))
    osc("role remove", "--project", "tour", "--user", "traveller", "member")
    assert "401" in osc.refused("token issue", *auth("secret-2"))

    osc("group create", "travellers")
    osc("group set", "--description", "on the road", "travellers")
    assert osc.json("group show", "travellers")["description"] == "on the road"
    osc("group add user", "travellers", "traveller")
    assert "traveller in group travellers" in osc("group contains user", "travellers", "traveller")
    assert "travellers" in osc.column("group list")
    osc("role add", "--project", "tour", "--group", "travellers", "reader")
    assert osc.json("token issue", *auth("secret-2"))["project_id"] == project
    osc("group remove user", "travellers", "traveller")
    osc("group delete", "travellers")

    osc("role delete", "pathfinder")
    osc("user delete", "traveller")
    osc("project delete", "tour")
    assert "tour" not in osc.column("project list")


def application_credentials(osc: OpenStackClient) -> None:
    """A program logs in with a credential of its own."""
    made = osc.json("application credential create", "ticket", cloud=DEMO)
    assert osc.column("application credential list", cloud=DEMO) == ["ticket"]
    assert osc.json("application credential show", "ticket", cloud=DEMO)["ID"] == made["ID"]
    auth = (
        "--os-auth-url", _auth_url(osc), "--os-auth-type", "v3applicationcredential",
        "--os-application-credential-id", made["ID"], "--os-application-credential-secret", made["Secret"],
    )  # fmt: skip
    assert osc.json("token issue", *auth, cloud="")["project_id"] == osc.json("project show", "demo")["id"]
    osc("application credential delete", "ticket", cloud=DEMO)
    assert osc.json("application credential list", cloud=DEMO) == []

    # One that may do nothing but list servers.
    rules = '[{"service": "compute", "method": "GET", "path": "/v2.1/servers*"},'
    rules += ' {"service": "compute", "method": "GET", "path": "/v2.1/servers/detail"}]'
    made = osc.json("application credential create", "--access-rules", rules, "watcher", cloud=DEMO)
    auth = (
        "--os-auth-url", _auth_url(osc), "--os-auth-type", "v3applicationcredential",
        "--os-application-credential-id", made["ID"], "--os-application-credential-secret", made["Secret"],
    )  # fmt: skip
    osc("server list", "--no-name-lookup", *auth, cloud="")
    assert "401" in osc.refused("flavor list", *auth, cloud="")
    assert "401" in osc.refused("network list", *auth, cloud="")
    known = osc.column("access rule list", name="ID", cloud=DEMO)
    assert len(known) == 2
    assert osc.json("access rule show", known[0], cloud=DEMO)["Service"] == "compute"
    osc("application credential delete", "watcher", cloud=DEMO)
    osc("access rule delete", *known, cloud=DEMO)
    assert osc.json("access rule list", cloud=DEMO) == []


def credentials(osc: OpenStackClient) -> None:
    """Secrets that the service keeps for users, those of EC2 among them."""
    made = osc.json("credential create", "--type", "cert", "demo", "a certificate")["id"]
    osc("credential set", "--user", "demo", "--type", "cert", "--data", "a newer one", made)
    assert osc.json("credential show", made)["blob"] == "a newer one"
    assert made in osc.column("credential list", name="ID")
    osc("credential delete", made)
    assert made not in osc.column("credential list", name="ID")

    access = osc.json("ec2 credentials create", cloud=DEMO)["access"]
    assert osc.json("ec2 credentials show", access, cloud=DEMO)["access"] == access
    assert osc.column("ec2 credentials list", name="Access", cloud=DEMO) == [access]
    osc("ec2 credentials delete", access, cloud=DEMO)
    assert osc.json("ec2 credentials list", cloud=DEMO) == []


def trusts(osc: OpenStackClient) -> None:
    """The demo user lets the administrator act in its project."""
    demo = osc.json("token issue", cloud=DEMO)["user_id"]
    admin = osc.json("token issue")["user_id"]
    # By ids: a member may not look up names.
    lent = ("--project", osc.json("project show", "demo")["id"], "--role", osc.json("role show", "member")["id"])
    made = osc.json("trust create", *lent, "--impersonate", demo, admin, cloud=DEMO)
    assert osc.json("trust show", made["id"], cloud=DEMO)["trustee_user_id"] == admin
    assert made["id"] in osc.column("trust list", name="ID")
    osc("trust delete", made["id"], cloud=DEMO)
    assert made["id"] not in osc.column("trust list", name="ID")


def limits(osc: OpenStackClient) -> None:
    """Limits that the service keeps for others: defaults, and those of a project."""
    osc("service create", "--name", "tour-library", "library")
    default = osc.json(
        "registered limit create",
        "--service",
        "tour-library",
        "--default-limit",
        "10",
        "--region",
        "RegionOne",
        "books",
    )["id"]
    osc("registered limit set", "--default-limit", "20", "--description", "on loan", default)
    shown = osc.json("registered limit show", default)
    assert (shown["default_limit"], shown["description"], shown["region_id"]) == (20, "on loan", "RegionOne")
    assert osc.column("registered limit list", "--service", "tour-library", name="Resource Name") == ["books"]
    of_books = ("--service", "tour-library", "--region", "RegionOne")
    own = osc.json("limit create", "--project", "demo", *of_books, "--resource-limit", "5", "books")["id"]
    osc("limit set", "--resource-limit", "6", "--description", "reads little", own)
    assert osc.json("limit show", own, cloud=DEMO)["resource_limit"] == 6
    assert osc.column("limit list", name="ID", cloud=DEMO) == [own]
    assert osc.column("limit list", *of_books, name="ID") == [own]
    assert "403" in osc.refused("limit set", "--resource-limit", "60", own, cloud=DEMO)
    assert "403" in osc.refused("registered limit delete", default)  # there are limits of it
    osc("limit delete", own)
    osc("registered limit delete", default)
    assert default not in osc.column("registered limit list", name="ID")
    osc("service delete", "tour-library")


def flavors(osc: OpenStackClient) -> None:
    """A private flavor, and who may use it."""
    assert {"m1.tiny", "m1.small", "m1.medium", "m1.large", "m1.xlarge"} <= set(osc.column("flavor list"))
    osc("flavor create", "--ram", "64", "--disk", "1", "--vcpus", "1", "--private", "hidden")
    osc("flavor set", "--property", "hw:cpu_policy=shared", "--project", "demo", "hidden")
    shown = osc.json("flavor show", "hidden")
    assert shown["properties"] == {"hw:cpu_policy": "shared"}
    assert len(shown["access_project_ids"]) == 1
    assert "hidden" in osc.column("flavor list", "--all", cloud=DEMO)
    osc("flavor unset", "--property", "hw:cpu_policy", "--project", "demo", "hidden")
    assert "hidden" not in osc.column("flavor list", "--all", cloud=DEMO)
    osc("flavor delete", "hidden")
    assert "hidden" not in osc.column("flavor list", "--all")


def keys(osc: OpenStackClient, directory: Path) -> None:
    """Key pairs."""
    private = osc("keypair create", "mine", cloud=DEMO)
    assert "PRIVATE KEY" in private
    assert osc.column("keypair list", cloud=DEMO) == ["mine"]
    public = directory / "key.pub"
    public.write_text(osc("keypair show", "--public-key", "mine", cloud=DEMO))
    osc("keypair create", "--public-key", str(public), "again", cloud=DEMO)
    fingerprints = {osc.json("keypair show", name, cloud=DEMO)["fingerprint"] for name in ("mine", "again")}
    assert len(fingerprints) == 1
    osc("keypair delete", "mine", "again", cloud=DEMO)
    assert osc.json("keypair list", cloud=DEMO) == []


def quotas(osc: OpenStackClient) -> None:
    """What a project may use, and what it has used."""
    limits = {row["Name"]: row["Value"] for row in osc.json("limits show", "--absolute", cloud=DEMO)}
    assert (limits["max_total_instances"], limits["total_instances_used"]) == (200, 0)
    osc("quota set", "--instances", "77", "--networks", "7", "demo")
    shown = {row["Resource"]: row["Limit"] for row in osc.json("quota show", "demo")}
    assert (shown["instances"], shown["networks"]) == (77, 7)
    assert osc.column("quota list", "--compute", name="Instances") == [77]
    osc("quota delete", "demo")
    shown = {row["Resource"]: row["Limit"] for row in osc.json("quota show", "demo")}
    assert (shown["instances"], shown["networks"]) == (200, 100)
    osc("quota show", "--default", cloud=DEMO)


def _auth_url(osc: OpenStackClient) -> str:
    return str(osc.json("configuration show")["auth.auth_url"])
