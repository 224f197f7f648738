"""Opening a store, its documents, its layout and its listing; M1 (a manifest that parses is one that fits together)."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_artifacts import SMALL, Given, artifact, find, flip, identity, key_of, left_in, payload, put, run, store

from hwr import telemetry
from hwr.errors import DomainPolicyMismatch, DomainUnavailable, StorageClassMismatch, UntrustedPermissions
from hwr.outcomes import InventoryState, QuarantineReason
from hwr.store import inventory
from hwr.store.containment import quarantine
from hwr.store.domain import Domain, Limits, open_domain
from hwr.store.explain import explain_miss
from hwr.store.layout import StoreLayout, check_key
from hwr.store.manifest import parse_manifest, parse_ready
from hwr.telemetry import events as E


def test_a_store_is_private_and_says_what_it_is(tmp_path: Path) -> None:
    with telemetry.record() as told:
        domain = store(tmp_path / "new" / "root")
    for path in domain.layout.directories:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    document = json.loads(domain.layout.domain.read_bytes())
    assert set(document) == {
        "schema_version",
        "domain_uuid",
        "scope",
        "domain_id",
        "backend",
        "storage_class",
        "filesystem_type",
    }
    (opened,) = told.of(E.DomainOpened)
    assert opened.created
    assert opened.writable
    assert store(domain.root).domain_uuid == domain.domain_uuid == document["domain_uuid"]
    assert left_in(domain.root) == sorted(left_in(domain.root))
    assert not [name for name in left_in(domain.root) if name.startswith(".")]


def test_other_limits_than_it_was_made_with_are_a_mismatch(tmp_path: Path) -> None:
    store(tmp_path / "root")
    with pytest.raises(DomainPolicyMismatch, match="max_store_bytes is None there, 5 here") as refused:
        store(tmp_path / "root", max_store_bytes=5)
    assert not refused.value.retryable


def without_documents(root: Path) -> None:
    (root / "domain.json").write_bytes(b"[]")


def open_to_others(root: Path) -> None:
    root.chmod(0o777)


def part_open_to_others(root: Path) -> None:
    (root / "deny").chmod(0o770)


def a_file(root: Path) -> None:
    os.rename(root, root.with_name("aside"))
    root.write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (without_documents, DomainPolicyMismatch),
        (open_to_others, UntrustedPermissions),
        (part_open_to_others, UntrustedPermissions),
        (a_file, DomainUnavailable),
    ],
)
def test_a_root_that_cannot_be_trusted_is_refused(tmp_path: Path, spoil: Callable[[Path], None], expected: type[Exception]) -> None:
    root = tmp_path / "root"
    store(root)
    spoil(root)
    with pytest.raises(expected):
        store(root)


def test_looking_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(DomainUnavailable):
        open_domain(tmp_path / "root", limits=Limits(), coordination_timeout_seconds=1, create=False)
    with pytest.raises(DomainUnavailable):
        open_domain(tmp_path, limits=Limits(), coordination_timeout_seconds=1, create=False)
    assert not left_in(tmp_path)


def test_a_filesystem_that_is_not_known_to_be_local_is_refused() -> None:
    with pytest.raises(StorageClassMismatch, match="proc filesystem") as refused:
        store("/proc/hwr")
    assert not refused.value.retryable


def test_many_open_a_new_store_at_once_and_agree(tmp_path: Path) -> None:
    code = """
import threading
told = set()
def go():
    told.add(store(sys.argv[1]).domain_uuid)
threads = [threading.Thread(target=go) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
print(len(told))
"""
    assert run(code, tmp_path / "root").strip() == "1"


@pytest.mark.parametrize("key", ["", "../" + "0" * 61, "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_only_a_key_becomes_part_of_a_path(key: str) -> None:
    with pytest.raises(ValueError):
        check_key(key)
    with pytest.raises(ValueError):
        StoreLayout(Path("/")).artifact(key)


# Who only looks ----------------------------------------------------------------------------------------------------


def test_the_listing_tells_states_apart_and_takes_no_lock(stored: Domain) -> None:
    for name in ("denied", "gone", "unfinished"):
        put(stored, name)
    flip(payload(stored, "denied"), 20)
    find(stored, "denied")
    quarantine(stored, key_of("gone"), QuarantineReason.CLEANUP)
    (artifact(stored, "unfinished") / "READY.json").unlink()
    stored.layout.new_temporary(key_of("dead")).mkdir()
    before = left_in(stored.layout.locks)
    with telemetry.record() as told:
        found = inventory.entries(stored.root)
    assert isinstance(found, tuple)
    assert not told.events
    assert left_in(stored.layout.locks) == before
    states = {(entry.key, entry.state, entry.reason) for entry in found}
    assert states == {
        (key_of(), InventoryState.READY, None),
        (key_of("denied"), InventoryState.DENIED, "manifest_corrupt"),
        (key_of("gone"), InventoryState.QUARANTINED, "cleanup"),
        (key_of("unfinished"), InventoryState.DENIED, "no_ready_marker"),
        (key_of("dead"), InventoryState.TEMPORARY, None),
    }
    size = sum(file.stat().st_size for file in artifact(stored).iterdir())
    assert next(entry for entry in found if entry.key == key_of()).size_bytes == size


def test_what_is_no_store_is_not_listed(tmp_path: Path) -> None:
    assert not inventory.entries(tmp_path)
    assert not inventory.entries(tmp_path / "absent")


def test_a_miss_is_explained_by_the_nearest_stored_identity(stored: Domain) -> None:
    put(stored, "b")
    asked = identity("c").to_json()
    told = explain_miss(stored.root, asked)
    assert told.sections == ("source",)
    assert told.fields == ("source.fingerprint",)
    assert told.candidates == 2
    assert told.nearest in (key_of(), key_of("b"))
    assert explain_miss(stored.root / "absent", asked).text() == "nothing is stored yet"


# M1 ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    domain = store(tmp_path_factory.mktemp("manifest") / "root")
    put(domain, tensors=[*SMALL, Given("odd", bytes(4097)), Given("odd too", bytes(4097))], aliases={"tied": "weight"})
    value: dict[str, Any] = json.loads((artifact(domain) / "manifest.json").read_bytes())
    assert value["files"][0]["fillers"]
    return value


def parsed(value: object) -> None:
    parse_manifest(json.dumps(value).encode())


def test_a_manifest_is_itself_again(document: dict[str, Any]) -> None:
    parsed(document)
    assert json.loads(parse_manifest(json.dumps(document).encode()).to_bytes()) == document


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "an unknown key": lambda m: m.update(extra=1),
    "a missing key": lambda m: m.pop("aliases"),
    "another schema": lambda m: m.update(schema_version=2),
    "another algorithm": lambda m: m.update(algorithm="sha256"),
    "a true number": lambda m: m.update(schema_version=True),
    "a tensor gone": lambda m: m["tensors"].pop(),
    "a tensor twice": lambda m: m["tensors"].append(m["tensors"][0]),
    "not sorted": lambda m: m["tensors"].reverse(),
    "another place": lambda m: m["tensors"][0].update(offset=m["tensors"][0]["offset"] + 1),
    "another file": lambda m: m["tensors"][0].update(file="model-00002-of-00002.safetensors"),
    "a path": lambda m: m["files"][0].update(name="../x.safetensors"),
    "another size": lambda m: m["files"][0].update(size=m["files"][0]["size"] + 1),
    "another header": lambda m: m["files"][0].update(header_bytes=8),
    "no header digest": lambda m: m["files"][0].update(header_digest=""),
    "a filler gone": lambda m: m["files"][0]["fillers"].pop(),
    "another unit digest": lambda m: m["tensors"][0].update(units=["0" * 64]),
    "another digest": lambda m: m["tensors"][0].update(digest="0" * 64),
    "another kind": lambda m: m["tensors"][0].update(kind="buffer"),
    "an unknown kind": lambda m: m["tensors"][0].update(kind="constant"),
    "a shape that does not fit": lambda m: m["tensors"][0].update(shape=[2]),
    "a negative shape": lambda m: m["tensors"][0].update(shape=[-1, -3]),
    "a dtype that does not fit": lambda m: m["tensors"][0].update(dtype="F64"),
    "an unknown dtype": lambda m: m["tensors"][0].update(dtype="F4"),
    "another stride": lambda m: m["tensors"][0].update(stride=[2]),
    "another content": lambda m: m.update(content_digest="0" * 64),
    "an alias of nothing": lambda m: m["aliases"].update(tied="absent"),
    "an alias of itself": lambda m: m["aliases"].update(weight="weight"),
    "a list": lambda m: m.update(tensors={}),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_a_manifest_whose_parts_do_not_fit_is_refused(document: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> None:
    """M1: even one whose digest READY would confirm."""
    value = json.loads(json.dumps(document))
    change(value)
    with pytest.raises(ValueError):
        parsed(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_value_in_any_place_is_refused_as_a_value(document: dict[str, Any], data: st.DataObject) -> None:
    """M1: nothing but ValueError and TypeError, which the validation turns into a typed failure."""
    value = json.loads(json.dumps(document))
    place = data.draw(st.sampled_from([value, value["tensors"][0], value["files"][0], value["files"][0]["fillers"][0]]))
    name = data.draw(st.sampled_from(sorted(place)))
    place[name] = data.draw(JSON)
    try:
        parsed(value)
    except (ValueError, TypeError):
        return
    assert value == document or name in ("identity", "alignment", "key", "header_digest", "digest", "aliases")


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=60) | st.text(max_size=60).map(str.encode) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_no_ready_marker_of_ours(raw: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_ready(raw)
