"""The source digest cache (C1) and the identity (I1)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_artifacts import NOBODY, identity, left_in, run, until

from hwr import telemetry
from hwr.checkpoint import digest_cache
from hwr.checkpoint.digest_cache import RACY_NS, SourceDigests, entry_name, fingerprint, source_digests
from hwr.checkpoint.identity import Adaptation, ArtifactIdentity, differences
from hwr.checkpoint.source import open_source
from hwr.errors import SourceChanged
from hwr.telemetry import events as E


def file(path: Path, data: bytes = b"abcd") -> None:
    header = json.dumps({path.stem: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def settle(directory: Path) -> None:
    """Wait until the files are older than the kernel's tick, so that their digests may be kept."""
    newest = max(entry.stat().st_ctime_ns for entry in directory.rglob("*"))
    probe = directory / ".probe"

    def old() -> bool:
        probe.write_bytes(b"")
        return probe.stat().st_ctime_ns > newest + 2 * RACY_NS

    until(old, "the tick")
    probe.unlink()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards and their index."""
    directory = tmp_path / "model"
    directory.mkdir()
    shards = ("one-00001-of-00002.safetensors", "two-00002-of-00002.safetensors")
    for name in shards:
        file(directory / name, name.encode())
    weight_map = {Path(name).stem: name for name in shards}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    settle(directory)
    return directory


@pytest.fixture
def entries(tmp_path: Path) -> Path:
    path = tmp_path / "entries"
    path.mkdir()
    return path


def digests(directory: Path, entries: Path | None) -> SourceDigests:
    with telemetry.record() as told:
        found = source_digests(open_source(directory), entries)
    (ended,) = told.of(E.SourceDigestEnded)
    assert ended.hashed == found.hashed
    return found


def test_each_file_has_one_entry_and_is_hashed_once(model: Path, entries: Path) -> None:
    """C1, R10: the second start hashes nothing and adds nothing."""
    first = digests(model, entries)
    assert first.hashed == 2
    names = left_in(entries)
    assert names == sorted(entry_name(path) for path in model.glob("*.safetensors"))
    second = digests(model, entries)
    assert second.hashed == 0
    assert second.content_ids == first.content_ids == digests(model, None).content_ids
    assert left_in(entries) == names


def first_of(model: Path) -> Path:
    return min(model.glob("*.safetensors"))


def other_size(path: Path) -> None:
    file(path, b"longer than before")


def same_size(path: Path) -> None:
    file(path, path.name.encode()[::-1])


def other_mtime(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def mtime_set_back(path: Path) -> None:
    """As rsync and some downloaders do: only the change time tells."""
    facts = path.stat()
    same_size(path)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def other_inode(path: Path) -> None:
    copy = path.with_suffix(".copy")
    shutil.copy2(path, copy)
    os.replace(copy, path)


def now_a_link(path: Path) -> None:
    path.rename(path.with_suffix(".blob"))
    path.symlink_to(path.with_suffix(".blob").name)


@pytest.mark.parametrize(
    "change", [other_size, same_size, other_mtime, mtime_set_back, other_inode, now_a_link], ids=lambda change: change.__name__
)
def test_a_file_that_may_have_changed_is_hashed_again(model: Path, entries: Path, change: Callable[[Path], None]) -> None:
    """C1."""
    before = digests(model, entries)
    change(first_of(model))
    settle(model)
    again = digests(model, entries)
    assert again.hashed == 1
    assert again.content_ids == digests(model, None).content_ids
    assert (again.content_ids == before.content_ids) is (change in (other_mtime, other_inode, now_a_link))
    assert digests(model, entries).hashed == 0
    assert len(left_in(entries)) == 2


def test_a_link_that_leads_elsewhere_is_hashed_again(model: Path, entries: Path) -> None:
    """C1: the link's own text belongs to the state."""
    path = first_of(model)
    now_a_link(path)
    settle(model)
    digests(model, entries)
    shutil.copy2(path.with_suffix(".blob"), path.with_suffix(".other"))
    path.unlink()
    path.symlink_to(path.with_suffix(".other").name)
    settle(model)
    assert digests(model, entries).hashed == 1


def test_a_digest_taken_in_the_tick_of_a_write_is_not_trusted(model: Path, entries: Path) -> None:
    """C1: a second write in that tick would leave the same times. It is hashed once more, and is trusted then."""
    before = first_of(model).read_bytes()
    first_of(model).write_bytes(before)
    assert digests(model, entries).hashed == 2
    settle(model)
    assert digests(model, entries).hashed == 1
    assert digests(model, entries).hashed == 0


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b"\xff", b'{"record_sha256": 1}'])
def test_a_broken_entry_is_no_entry(model: Path, entries: Path, damage: bytes) -> None:
    first = digests(model, entries)
    (entries / entry_name(first_of(model))).write_bytes(damage)
    again = digests(model, entries)
    assert (again.hashed, again.content_ids) == (1, first.content_ids)
    assert digests(model, entries).hashed == 0


def test_an_entry_that_says_something_else_fails_its_own_digest(model: Path, entries: Path) -> None:
    first = digests(model, entries)
    path = entries / entry_name(first_of(model))
    record = json.loads(path.read_bytes())
    record["content_id"] = "blake3:" + "0" * 64
    path.write_text(json.dumps(record))
    assert digests(model, entries).content_ids == first.content_ids


def test_an_entry_of_another_file_under_this_name_is_no_entry(model: Path, entries: Path) -> None:
    first = digests(model, entries)
    one, two = (entries / entry_name(path) for path in sorted(model.glob("*.safetensors")))
    shutil.copy(two, one)
    assert digests(model, entries).content_ids == first.content_ids


def test_without_a_place_to_write_it_still_works(model: Path, entries: Path, tmp_path: Path) -> None:
    code = """
from pathlib import Path
from hwr.checkpoint.digest_cache import source_digests
from hwr.checkpoint.source import open_source
found = source_digests(open_source(sys.argv[1]), Path(sys.argv[2]))
print(found.hashed, *found.content_ids)
"""
    entries.chmod(0o555)
    for place in (entries, tmp_path / "absent"):
        told = run(code, model, place, prefix=NOBODY if os.geteuid() == 0 and readable_for_others(model) else ()).split()
        assert told[0] == "2"
        assert tuple(told[1:]) == digests(model, None).content_ids


def readable_for_others(path: Path) -> bool:
    return all(part.stat().st_mode & 0o001 for part in (path, *path.parents))


def test_a_file_that_changes_between_look_and_hash_is_refused(model: Path, entries: Path) -> None:
    source = open_source(model)
    same_size(first_of(model))
    with pytest.raises(SourceChanged):
        source_digests(source, entries)
    assert not left_in(entries)


def test_content_over_several_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file, made of holes: read in windows, told at most four times a second."""
    directory = tmp_path / "model"
    directory.mkdir()
    size = 200 << 20
    header = json.dumps({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path = directory / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)
    with telemetry.record() as told:
        one = source_digests(open_source(directory), None)
    done = [event.done_bytes for event in told.of(E.SourceDigestProgress)]
    assert done == sorted(done)
    (ended,) = told.of(E.SourceDigestEnded)
    assert ended.bytes == path.stat().st_size
    with path.open("r+b") as changed:
        changed.seek(-1, os.SEEK_END)
        changed.write(b"\1")
    assert digests(directory, None).content_ids != one.content_ids


# I1 ---------------------------------------------------------------------------------------------------------------


def test_two_spellings_of_one_directory_share_their_entries(model: Path, entries: Path, tmp_path: Path) -> None:
    """I1."""
    first = digests(model, entries)
    (tmp_path / "link").symlink_to(model)
    for spelling in (tmp_path / "link", model / ".." / "model", Path(os.path.relpath(model))):
        again = digests(spelling, entries)
        assert (again.hashed, again.content_ids) == (0, first.content_ids)
    assert len(left_in(entries)) == 2


def test_a_hugging_face_cache_has_the_content_of_a_plain_directory(model: Path, entries: Path, tmp_path: Path) -> None:
    """I1: links into blobs that have no suffix; two revisions of one blob are the same content."""
    plain = fingerprint(digests(model, entries).content_ids)
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copy(path, repository / "blobs" / f"{number:064x}")
        for revision in ("a" * 40, "b" * 40):
            snapshot = repository / "snapshots" / revision
            snapshot.mkdir(parents=True, exist_ok=True)
            (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    settle(repository)
    for snapshot in (repository / "snapshots").iterdir():
        assert fingerprint(digests(snapshot, entries).content_ids) == plain
        assert digests(snapshot, entries).hashed == 0


def test_a_fingerprint_is_over_contents_whatever_their_order() -> None:
    assert fingerprint(["a", "b"]) == fingerprint(["b", "a"]) != fingerprint(["a", "a", "b"])


def test_an_identity_comes_back_from_its_json_and_nothing_else_does() -> None:
    """I1: unknown and missing keys, other types and other schemas are refused."""
    mine = identity()
    assert ArtifactIdentity.from_json(json.loads(json.dumps(mine.to_json()))) == mine
    value = mine.to_json()
    wrong = [
        None,
        {**value, "path": "/x"},
        {name: part for name, part in value.items() if name != "layout"},
        {**value, "schema_version": 2},
        {**value, "source": {**value["source"], "path": "/x"}},
        {**value, "source": {"model_id": "x"}},
        {**value, "source": {**value["source"], "model_id": 5}},
        {**value, "layout": {**value["layout"], "tensor_parallel_size": True}},
        {**value, "layout": {**value["layout"], "tensor_parallel_rank": "0"}},
        {**value, "component": {**value["component"], "metadata": []}},
    ]
    for one in wrong:
        with pytest.raises((ValueError, TypeError)):
            ArtifactIdentity.from_json(one)
    with pytest.raises(ValueError, match="fingerprint"):
        Adaptation(kind="lora")


def test_every_field_of_an_identity_is_in_its_key_and_named_when_it_differs() -> None:
    """I1."""
    mine = identity()
    seen = {mine.key}
    for section, part in mine.to_json().items():
        if not isinstance(part, dict):
            continue
        for name, value in part.items():
            other = {"x": 1} if isinstance(value, dict) else value + 1 if isinstance(value, int) else f"{value}x"
            given = {name: other} if (section, name) != ("adaptation", "kind") else {"kind": "lora", "fingerprint": "f"}
            changed = replace(mine, **{section: replace(getattr(mine, section), **given)})
            assert changed.key not in seen
            seen.add(changed.key)
            assert f"{section}.{name}" in differences(mine.to_json(), changed.to_json())
    assert not differences(mine.to_json(), mine.to_json())
    assert "source" in differences(mine.to_json(), None)


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.booleans())))
def test_metadata_of_any_kind_gives_a_key_that_does_not_depend_on_order(metadata: dict[str, object]) -> None:
    """I1."""
    one = replace(identity(), source=replace(identity().source, metadata=metadata))
    two = replace(identity(), source=replace(identity().source, metadata=dict(reversed(metadata.items()))))
    assert one.key == two.key
    assert len(one.key) == 64
    assert digest_cache.SCHEMA_VERSION == 1
