"""Whatever clients send, parsing it returns a value or raises a MicronovaError."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from micronova.embedded.image import attributes, listing, patch
from micronova.embedded.image.model import Image
from micronova.objects.errors import MicronovaError

IMAGE = Image(
    id="x", name="n", status="queued", visibility="shared", owner="p1", disk_format=None, container_format=None,
    min_disk=0, min_ram=0, protected=False, os_hidden=False, created_at=0, updated_at=0, properties={"foo": "bar"},
)  # fmt: skip

known = [*attributes.WRITABLE, *attributes.READ_ONLY, "id", "locations", "foo", "kernel_id"]
names = st.sampled_from(known) | st.text()
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)
special = ["limit", "marker", "sort", "sort_key", "sort_dir", "tag", "owner", "visibility", "member_status", "size_min"]
parameters = st.sampled_from([*listing.SORT_KEYS, *special, "protected", "os_hidden"]) | st.text()
parts = ["in:", "gt:", "asc", "desc", "name", ",", ":", '"', "true", "-1", "2020-01-01", "all"]
words = st.sampled_from(parts) | st.text()


@given(st.dictionaries(parameters, st.lists(st.lists(words).map("".join), min_size=1, max_size=3), max_size=5))
def test_queries(query: dict[str, list[str]]) -> None:
    try:
        found = listing.read(query)
    except MicronovaError:
        return
    assert 0 <= found.limit <= 1000
    assert [key for key, _ in found.order].count("id") == 1
    assert len({key for key, _ in found.order}) == len(found.order)


operations = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from(["add", "replace", "remove"]) | values,
        "path": names.map(lambda name: f"/{name}") | values,
        "value": values,
        "add": values,
        "remove": values,
    },
)


@given(st.sampled_from(list(patch.MEDIA_TYPES)), st.lists(operations | values, max_size=4), st.booleans())
def test_patches(kind: str, body: list[Any], is_admin: bool) -> None:
    try:
        changed = patch.apply(IMAGE, patch.read(kind, body), is_admin=is_admin)
    except MicronovaError:
        return
    # What no client may change has not changed, and the new values are valid.
    for name in ("id", "status", "size", "checksum", "created_at", "revision"):
        assert getattr(changed, name) == getattr(IMAGE, name)
    assert is_admin or changed.owner == IMAGE.owner
    for name in attributes.WRITABLE:
        value = getattr(changed, name)
        attributes.check(name, list(value) if name == "tags" else value)
    for name, value in changed.properties.items():
        attributes.check_writable(name)
        attributes.check(name, value)
