"""Personal model in place of a release's parameters, only if complete and matching."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from device_agent.exchange import outbox, state_files
from device_agent.exchange.outbox import Outbox
from device_agent.exchange.own_model import OwnModelServing
from device_agent.inference.models import ServedModels, ServedVersion, describe_statistics
from device_agent.inference.release_folder import (
    OWN,
    OwnModel,
    ReleaseFiles,
    compute_own_digest,
    read_folder,
    read_own_header,
)
from device_agent.inference.session import open_model
from shared.errors import CorruptFile, ServingRefused
from shared.protocol.inference.release import PARAMETERS, PROBES, read_manifest
from shared.protocol.messages import ProjectVersion, Spec, Update
from shared.runtime.executor import inline

pytestmark = pytest.mark.virtual_time


def write_own(path: Path, tensors: dict[str, np.ndarray], model: Spec, *, run: str = "run", number: int = 1) -> None:
    """Write parameters as a trainer does."""
    contents = compute_own_digest({name: one.tobytes() for name, one in tensors.items()})
    told = OwnModel(model=model, run=run, round=number, contents=contents)
    save_file(tensors, path, {OWN: msgspec.json.encode(told).decode()})


@pytest.fixture
def files(made: dict[str, Path]) -> ReleaseFiles:
    return read_folder(made["tiny-1"])


def network(files: ReleaseFiles) -> Spec:
    return read_manifest(files.manifest, "manifest").model


def test_own_parameters_answer_and_the_statistics_name_them(made, files, settings, tmp_path):
    """They are those of another version here, whose outputs are known."""
    own = tmp_path / "own"
    write_own(own, load_file(made["tiny-2"] / PARAMETERS), network(files), run="mine", number=7)
    model = open_model(files.manifest, files.parts, settings, own_path=own)
    probes = load_file(made["tiny-2"] / PROBES)
    found = model.run(probes["inputs"])
    assert np.abs(found - probes["outputs"]).max() <= 1e-5 * np.abs(probes["outputs"]).max()
    assert describe_statistics(ServedVersion(model))["parameters"]["own_model"] == "mine@7"
    plain = open_model(files.manifest, files.parts, settings)
    assert "own_model" not in describe_statistics(ServedVersion(plain))["parameters"]


def test_they_answer_from_one_request_to_the_next(made, files, settings, tmp_path):
    """A request that began before is answered by what it began with; none finds nothing."""
    own, models = tmp_path / "own", ServedModels()
    write_own(own, load_file(made["tiny-2"] / PARAMETERS), network(files))
    models.add(open_model(files.manifest, files.parts, settings))
    models.switch("tiny", 1)
    held = models.find("tiny")
    inputs = load_file(files.parts[PROBES])["inputs"]
    before = held.run(inputs)
    models.add(open_model(files.manifest, files.parts, settings, own_path=own))
    assert (held.run(inputs) == before).all()
    assert (models.find("tiny").run(inputs) != before).any()
    assert models.versions("tiny") == [1]


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        ("digest", "{own}"),
        ("nan", "{name!r}"),
        ("missing", "{name!r}"),
        ("more", "'zzz'"),
        ("shape", "{name!r}"),
        ("dtype", "float16"),
        ("cut", "SafetensorError"),
        ("words", "{own}"),
        ("gone", "{own}"),
    ],
)
def test_what_cannot_take_the_release_s_place_leaves_it_there(spoil, cause, files, settings, tmp_path, caplog):
    """The release's parameters answer, and the log says why."""
    own = tmp_path / "own"
    tensors = {name: one + 1 for name, one in load_file(files.parts[PARAMETERS]).items()}
    name = max(tensors)
    if spoil == "nan":
        tensors[name] = np.full_like(tensors[name], np.nan)
    elif spoil == "missing":
        del tensors[name]
    elif spoil == "more":
        tensors["zzz"] = np.zeros(1, np.float32)
    elif spoil == "shape":
        tensors[name] = tensors[name][..., :-1].copy()
    elif spoil == "dtype":
        tensors[name] = tensors[name].astype(np.float16)
    write_own(own, tensors, network(files))
    data = bytearray(own.read_bytes())
    if spoil == "digest":
        data[-1] ^= 1
    own.write_bytes(b"no tensors" if spoil == "words" else data[:-1] if spoil == "cut" else data)
    if spoil == "gone":
        own.unlink()
    model = open_model(files.manifest, files.parts, settings, own_path=own)
    probes = load_file(files.parts[PROBES])
    assert np.abs(model.run(probes["inputs"]) - probes["outputs"]).max() <= 1e-5 * np.abs(probes["outputs"]).max()
    assert model.own_model == ""
    [told] = [record.args for record in caplog.records if record.levelname == "WARNING"]
    assert cause.format(name=name, own=own) in str(told)


class MemoryProcess:
    """What answers, and what was opened anew."""

    def __init__(self, *answering: ReleaseFiles) -> None:
        self.ready, self.opened, self.own = asyncio.Event(), list[str](), None
        self.refusal: ServingRefused | None = None
        self._answering = answering
        self.ready.set()

    def active_files(self) -> list[ReleaseFiles]:
        return list(self._answering)

    async def reload(self, files: ReleaseFiles) -> bool:
        path = self.own.path_for(files)
        if self.refusal:
            raise self.refusal
        self.opened.append(f"{files.name} {read_own_header(Path(path)).round if path else 'of the release'}")
        return True


async def test_every_newer_model_is_opened_where_its_network_answers(made, files, tmp_path):
    """The other release is left alone; what is served already is not opened again; a refusal ends nothing."""
    process = MemoryProcess(files, read_folder(made["lenet"]))
    tensors = load_file(files.parts[PARAMETERS])
    path = tmp_path / state_files.OWN
    serving = OwnModelServing(tmp_path, process)
    living = asyncio.create_task(serving.run())
    for number in (1, 2, 2, 3, 4):
        process.refusal = ServingRefused("no room") if number == 3 else None
        write_own(path, tensors, network(files), number=number)
        serving.changed.set()
        await asyncio.sleep(1)
    path.write_bytes(b"damaged")
    serving.changed.set()
    await asyncio.sleep(1)
    assert not living.done()
    living.cancel()
    assert process.opened == ["tiny 1", "tiny 2", "tiny 4"]


async def test_a_model_that_is_refused_does_not_answer_and_is_judged_once(files, tmp_path, caplog):
    """Neither now nor after a restart; the next one is judged anew, and the release answers meanwhile."""
    tensors, path = load_file(files.parts[PARAMETERS]), tmp_path / state_files.OWN
    process, judged = MemoryProcess(files), list[int]()

    async def judge(_: ReleaseFiles) -> str:
        judged.append(read_own_header(path).round)
        return "accuracy: 0.1" if judged[-1] == 1 else ""

    def write(number: int) -> None:
        write_own(path, {name: one + number for name, one in tensors.items()}, network(files), number=number)

    for number in (1, 1, 2, 2):
        write(number)
        serving = OwnModelServing(tmp_path, process, judge, inline)
        living = asyncio.create_task(serving.run())
        await asyncio.sleep(1)
        assert bool(serving.path_for(files)) == (number == 2)
        living.cancel()
    assert judged == [1, 2]
    assert caplog.text.count("accuracy: 0.1") == 1


def test_a_model_of_another_network_is_told_of_once_a_run(files, tmp_path, virtually, caplog):
    process = MemoryProcess(files)

    async def story() -> None:
        serving = OwnModelServing(tmp_path, process)
        living = asyncio.create_task(serving.run())
        for number in (1, 2):
            write_own(tmp_path / state_files.OWN, {"w": np.zeros(1, np.float32)}, Spec(name="cnn"), number=number)
            serving.changed.set()
            await asyncio.sleep(1)
        living.cancel()

    with caplog.at_level(logging.WARNING):
        virtually(story())
    assert process.opened == []
    assert ["cnn" in record.getMessage() for record in caplog.records] == [True]


def test_a_model_is_the_newest_once_its_update_is_committed_whoever_does_so(tmp_path):
    """The agent, or the next one where a trainer outlived its agent."""
    updates = Outbox(tmp_path / "outbox", tmp_path / "state")
    changes = []
    updates.own_changed = lambda: changes.append(1)
    newest = tmp_path / "state" / state_files.OWN
    for number in (1, 2):
        draft = updates.draft("run", number)
        (draft / outbox.OWN).write_text(str(number))
        outbox.write(draft, Update(run="run", round=number, device="a", params=None, start=b"", failure="none"))
        if number == 1:
            updates.commit(draft)
            assert newest.read_text() == "1"
        else:
            outbox.commit(draft)
            assert newest.read_text() == "1"
    assert len(changes) == 1
    Outbox(tmp_path / "outbox", tmp_path / "state")
    assert newest.read_text() == "2"
    updates.forget(["run"])
    assert newest.exists()


def test_a_file_that_is_not_there_is_no_model_and_one_that_says_nothing_is_corrupt(tmp_path):
    path = tmp_path / "own"
    assert read_own_header(path) is None
    save_file({"w": np.zeros(1, np.float32)}, path)
    with pytest.raises(CorruptFile, match=re.escape(str(path))):
        read_own_header(path)


@pytest.mark.parametrize(
    ("trained", "released", "matches"),
    [("0.1.0", "0.1.0", True), ("0.2.0", "0.1.0", False), ("", "0.1.0", True), ("0.1.0", "", True), ("", "", True)],
)
def test_a_model_by_another_version_of_its_project_does_not_answer(trained, released, matches, files):
    """Its network may be another one under the same name; where either names no project, the network decides."""
    manifest = read_manifest(files.manifest, "manifest")
    projects = [ProjectVersion(name="air", version=version) if version else None for version in (trained, released)]
    source = msgspec.structs.replace(manifest.source, project=projects[1] or msgspec.UNSET)
    model = OwnModel(model=network(files), run="run", round=1, contents="", project=projects[0])
    assert model.matches(msgspec.structs.replace(manifest, source=source)) == matches
