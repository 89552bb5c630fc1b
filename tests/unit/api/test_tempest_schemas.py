"""The judge must be able to say no."""

import copy

import pytest

from tests.schemas.tempest import check, find, versions_of

GOOD = {"keypairs": [{"keypair": {"name": "n", "public_key": "k", "fingerprint": "f"}}]}


def test_what_matches_is_accepted() -> None:
    check("keypairs", "list_keypairs", 1, 200, GOOD)


def test_status_missing_extra_and_wrong_fields_are_refused() -> None:
    with pytest.raises(AssertionError, match="status 201"):
        check("keypairs", "list_keypairs", 1, 201, GOOD)
    with pytest.raises(AssertionError, match="'type' is a required property"):
        check("keypairs", "list_keypairs", 2, 200, GOOD)
    extra = copy.deepcopy(GOOD)
    extra["keypairs"][0]["keypair"]["more"] = "x"
    with pytest.raises(AssertionError, match="more"):
        check("keypairs", "list_keypairs", 1, 200, extra)
    with pytest.raises(AssertionError, match="no body"):
        check("keypairs", "delete_keypair", 2, 204, {"a": 1})


def test_the_newest_schema_up_to_a_version_is_chosen() -> None:
    assert 201 in find("keypairs", "create_keypair", 2)["status_code"]
    assert 200 in find("keypairs", "create_keypair", 1)["status_code"]
    assert versions_of("keypairs") == [1, 2, 104]
    assert "rxtx_factor" in str(find("flavors", "list_flavors_details", 101))
    assert "rxtx_factor" not in str(find("flavors", "list_flavors_details", 102))
