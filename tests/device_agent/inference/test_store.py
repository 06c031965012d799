"""The releases of a board: records that survive damage, parts by their digests, the last two versions, full disks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from device_agent.inference.store import BoardStore
from shared.errors import ConfigError, CorruptFile, Unwritable
from shared.protocol.inference.release import PARAMETERS, ReleaseManifest, write_manifest
from shared.protocol.update import UpdateRecord, advance, take_offer
from tests.device_agent.inference.releases import light_release, offer_of
from tests.full_disk import refuse_writes
from tests.naming import naming

TO_COMMITTED = ("fetched", "verified", "staged", "switched", "passed")


@pytest.fixture
def store(tmp_path: Path) -> BoardStore:
    return BoardStore(tmp_path, reserve_bytes=0)


def offered(store: BoardStore, version: int, name: str = "digits", size: int = 100) -> ReleaseManifest:
    """Note an offer and put its parts there."""
    manifest, parts = light_release(name, version, size)
    store.write(take_offer(store.record(name), offer_of(manifest), 0.0), write_manifest(manifest))
    for digest, data in parts.items():
        store.parts.add(digest, data)
    return manifest


def commit(store: BoardStore, version: int, name: str = "digits") -> UpdateRecord:
    offered(store, version, name)
    for event in TO_COMMITTED:
        store.write(advance(store.record(name), event, 0.0))
    store.tidy()
    return store.record(name)


def test_nothing_was_ever_offered(store):
    assert (store.names(), store.record("digits"), store.versions("digits")) == ([], UpdateRecord(name="digits"), [])
    store.tidy()
    with pytest.raises(CorruptFile, match=re.escape(str(store.folder / "digits" / "1.json"))):
        store.manifest("digits", 1)


def test_a_record_is_there_for_the_next_process(store, tmp_path):
    record = commit(store, 1)
    again = BoardStore(tmp_path)
    assert again.names() == ["digits"]
    assert again.record("digits") == record
    assert again.manifest("digits", 1) == light_release("digits", 1)[0]
    assert again.parts.missing(again.manifest("digits", 1)) == {}


def test_the_last_two_versions_stay_and_what_they_have_in_common_lies_there_once(store):
    for version in (1, 2, 3):
        commit(store, version)
    assert store.versions("digits") == [2, 3]
    wanted = {part.sha256 for version in (2, 3) for part in store.manifest("digits", version).parts.values()}
    assert {path.name for path in store.parts.path("x").parent.iterdir()} == wanted
    assert len(wanted) == 4  # two of parameters, one graph, one of probes
    assert store.parts.missing(light_release("digits", 1)[0]).keys() == {"parameters.safetensors"}


def test_a_candidate_stays_while_it_is_under_way_and_goes_when_it_is_refused(store):
    commit(store, 1)
    offered(store, 2)
    store.tidy()
    assert store.versions("digits") == [1, 2]
    store.write(advance(store.record("digits"), "refused", 0.0, "because"))
    store.tidy()
    assert store.versions("digits") == [1]
    assert store.parts.missing(light_release("digits", 1)[0]) == {}


@pytest.mark.parametrize("damage", [b"", b"\0" * 700, None])
def test_a_damaged_record_is_that_of_one_step_before(store, damage):
    """A disk that loses what was written last: the step is taken again."""
    commit(store, 1)
    offered(store, 2)
    before = store.record("digits")
    store.write(advance(before, "fetched", 0.0))
    state = store.folder / "digits" / "state"
    state.write_bytes(state.read_bytes()[:-9] if damage is None else damage)
    assert store.record("digits") == before
    store.write(advance(before, "fetched", 1.0))
    assert store.record("digits").phase == "fetched"


def test_where_both_records_are_damaged_nothing_is_removed(store):
    commit(store, 1)
    for name in ("state", "state.before"):
        (store.folder / "digits" / name).write_bytes(b"\0")
    with pytest.raises(CorruptFile):
        store.record("digits")
    store.tidy()
    assert store.versions("digits") == [1]
    store.write(UpdateRecord(name="digits"))  # begins anew
    assert store.record("digits") == UpdateRecord(name="digits")


def test_parts_that_are_not_what_their_digest_says_are_not_taken(store, tmp_path):
    manifest, parts = light_release("digits", 1)
    digest, data = manifest.parameters.sha256, parts[manifest.parameters.sha256]
    with pytest.raises(CorruptFile):
        store.parts.add(digest, data[:-1])
    came = tmp_path / "came"
    came.write_bytes(data[:-1] + b"x")
    store.parts.add(manifest.probes.sha256, parts[manifest.probes.sha256])
    with pytest.raises(CorruptFile, match=naming(came, digest[:12])):
        store.parts.adopt(digest, came)
    assert came.exists()
    assert store.parts.missing(manifest).keys() == {"graph.onnx", "parameters.safetensors"}
    came.write_bytes(data)
    store.parts.adopt(digest, came)
    assert not came.exists()
    assert store.parts.missing(manifest).keys() == {"graph.onnx"}
    store.parts.path(digest).chmod(0o600)
    store.parts.path(digest).write_bytes(data[:-1])
    assert "parameters.safetensors" in store.parts.missing(manifest)  # cut short by a disk
    store.parts.drop(digest)
    store.parts.drop(digest)


def test_a_manifest_of_another_release_is_told(store):
    offered(store, 1)
    (store.folder / "digits" / "2.json").write_bytes(write_manifest(light_release("digits", 1)[0]))
    with pytest.raises(CorruptFile, match="digits/1"):
        store.manifest("digits", 2)
    (store.folder / "digits" / "3.json").write_bytes(b'{"format": 99}')
    with pytest.raises(ConfigError, match=naming(store.folder / "digits" / "3.json", 99)):
        store.manifest("digits", 3)
    assert store.release("digits", 1) == offer_of(light_release("digits", 1)[0]).release
    assert store.release("digits", 9) == ""


def test_what_is_no_name_is_passed_over(store):
    commit(store, 1)
    (store.folder / ".hidden").mkdir()
    (store.folder / "file").write_text("")
    (store.folder / "empty").mkdir()
    store.tidy()
    assert store.names() == ["digits"]


def test_a_release_called_as_a_folder_of_the_store_has_a_place_of_its_own(store):
    for name in ("parts", "state", "digits"):
        commit(store, 1, name)
    assert store.names() == ["digits", "parts", "state"]
    assert all(store.parts.missing(store.manifest(name, 1)) == {} for name in store.names())


def test_there_must_be_room_before_anything_is_fetched(disk):
    """On a disk of 4 MiB: what is there already needs no room again."""
    store = BoardStore(disk.path, reserve_bytes=1 << 20)
    manifest, parts = light_release("digits", 1, 4 << 20)
    with pytest.raises(Unwritable, match="digits/1"):
        store.require_room(manifest)
    manifest, parts = light_release("digits", 1, 1 << 20)
    store.require_room(manifest)
    for digest, data in parts.items():
        store.parts.add(digest, data)
    store.require_room(manifest)
    with pytest.raises(Unwritable, match=naming("5.0 MiB")):
        BoardStore(disk.path, reserve_bytes=5 << 20).require_room(manifest)


def test_a_full_disk_leaves_the_record_as_it_was(store, monkeypatch):
    commit(store, 1)
    before = store.record("digits")

    with monkeypatch.context() as patch:
        refuse_writes(patch)
        with pytest.raises(Unwritable):
            offered(store, 2)
    assert store.record("digits") == before
    offered(store, 2)
    assert store.record("digits").phase == "offered"


def test_models_are_for_their_user_alone(store):
    commit(store, 1)
    assert store.folder.stat().st_mode & 0o077 == 0
    assert (store.folder / "digits").stat().st_mode & 0o077 == 0


def test_parts_of_what_will_be_offered_stay_until_something_else_will_be(store, tmp_path):
    commit(store, 1)
    (second, parts), (third, _) = light_release("digits", 2), light_release("digits", 3)
    store.keep_ahead(write_manifest(second))
    for digest, data in parts.items():
        store.parts.add(digest, data)
    store.tidy()
    assert (store.ahead(), store.parts.missing(second)) == (second, {})
    assert (store.names(), store.versions("digits")) == (["digits"], [1])
    store.keep_ahead(write_manifest(third))
    assert set(store.parts.missing(second)) == {PARAMETERS}
    with pytest.raises(Unwritable, match="digits/2"):
        BoardStore(tmp_path, reserve_bytes=1 << 62).keep_ahead(write_manifest(second))
    assert store.ahead() is None
    (store.folder / ".ahead").write_bytes(b"damaged")
    store.tidy()
    assert store.ahead() is None
    assert store.parts.missing(store.manifest("digits", 1)) == {}
