"""What the doctor makes of what `[serve]` asks of a board: each check from its inputs alone, and once all together."""

from __future__ import annotations

import socket

import msgspec
import pytest

from device_agent.commands.diagnosis import examine, serving
from device_agent.commands.diagnosis import serving_checks as doctor
from device_agent.commands.diagnosis.checks import MIB
from device_agent.config import AgentConfig, ServeConfig, TrainerConfig
from device_agent.inference.settings import InferenceSettings
from device_agent.inference.store import BoardStore
from device_agent.profile.schema import Inference
from device_agent.trainer.beside_serving import choose_share
from shared.data.spec import Data
from shared.protocol.inference.release import GRAPH, MANIFEST, PARAMETERS, PROBES, write_manifest
from shared.protocol.update import UpdateRecord, advance, take_offer
from tests.device_agent.inference.releases import light_release, offer_of
from tests.machine import free_port, grow, profile

FAKE = "__version__ = '1.2.3'\ndef get_available_providers(): return ['CPUExecutionProvider']\n"
"""A library that answers at once; the real one is asked where it serves."""


@pytest.mark.parametrize(
    ("version", "providers", "wanted", "state", "words"),
    [
        ("1.20.1", ["CPUExecutionProvider"], "cpu", "ok", "ONNX Runtime 1.20.1, CPU"),
        ("1.20.1", ["CUDAExecutionProvider", "CPUExecutionProvider"], "cuda", "ok", "CUDA, CPU"),
        ("1.20.1", ["CPUExecutionProvider"], "tensorrt", "warn", "no tensorrt, so the CPU computes"),
        ("1.20.1", [], "cpu", "bad", "does not run"),
        ("", [], "cpu", "bad", "[infer]"),
    ],
)
def test_the_runtime(version, providers, wanted, state, words) -> None:
    check = doctor.check_runtime(version, providers, wanted)
    assert check.state == state
    assert words in check.finding + check.remedy


@pytest.mark.parametrize(
    ("port", "refusal", "taken", "runs", "state", "words"),
    [
        (0, "", False, False, "ok", "socket alone"),
        (8471, "", False, False, "ok", "is free"),
        (8471, "Address already in use", True, False, "bad", "ss -ltnp 'sport = :8471'"),
        (80, "Permission denied", False, False, "bad", "Permission denied"),
        (8471, "Address already in use", True, True, "ok", "while the agent runs"),
        (8471, "", False, True, "warn", "nobody listens"),
    ],
)
def test_the_port(port, refusal, taken, runs, state, words) -> None:
    check = doctor.check_port(port, refusal, is_taken=taken, agent_runs=runs)
    assert check.state == state
    assert words in check.finding + check.remedy


@pytest.mark.parametrize(
    ("limit_mib", "weight_mib", "free_mib", "state", "words"),
    [
        (500, 0, 1000, "ok", "with no model yet"),
        (700, 100, 1000, "ok", "with a model of 100 MiB"),
        (95, 0, 1000, "bad", "memory_mb of [serve] to 96"),
        (250, 100, 1000, "bad", "memory_mb of [serve] to 696"),
        (500, 100, 1000, "warn", "every rollout is refused"),
        (700, 100, 200, "warn", "end other programs"),
        (700, 100, None, "ok", "at most"),
    ],
)
def test_the_limit_of_memory(limit_mib, weight_mib, free_mib, state, words) -> None:
    free = None if free_mib is None else free_mib * MIB
    check = doctor.check_serving_memory(limit_mib * MIB, weight_mib * MIB, free)
    assert check.state == state
    assert words in check.finding + check.remedy


def record_of(version: int, *events: str, before: UpdateRecord | None = None) -> UpdateRecord:
    record = take_offer(before or UpdateRecord(name="eels"), offer_of(light_release("eels", version)[0]), 0.0)
    for event in events:
        record = advance(record, event, 0.0, "NaN" if event == "refused" else "")
    return record


SERVED = record_of(3, "fetched", "verified", "staged", "switched", "passed")


@pytest.mark.parametrize(
    ("folders", "records", "damages", "refusals", "state", "words"),
    [
        ({}, [], [], [], "ok", "none yet"),
        ({"digits": 2}, [SERVED], [], [], "ok", "eels/3; digits/2 of a folder"),
        ({"eels": 1}, [SERVED], [], [], "ok", "eels/3"),
        ({}, [record_of(4, "refused", before=SERVED)], [], [], "ok", "eels/3, 4 was refused: NaN"),
        (
            {},
            [record_of(4, "fetched", "verified", "staged", "switched", before=SERVED)],
            [],
            [],
            "ok",
            "eels/4, on trial, 3 before it",
        ),
        ({}, [SERVED], ["eels/3: graph is gone"], [], "warn", "graph is gone"),
        ({}, [SERVED], [], ["no folder"], "bad", "the agent does not start: no folder"),
    ],
)
def test_the_releases(folders, records, damages, refusals, state, words) -> None:
    check = doctor.check_releases(folders, records, damages, refusals)
    assert check.state == state
    assert words in check.finding


def test_settings_are_told_with_who_says_so() -> None:
    told = InferenceSettings(port=1, socket="s", memory_bytes=1, threads=2, spin_us=50, arena=False)
    board = profile(inference=Inference(spin_us=70, origin={"spin_us": "measured"}))
    share = choose_share(TrainerConfig(nice=3), board, {0, 1}, serves=True)
    finding = doctor.describe_settings(told, {"threads": True}, board, share).finding
    assert finding == (
        f"threads 2 (the agent's file); spinning for 50 us ({board.id}: measured); "
        "arena off (on from 1 GiB of memory); "
        "the trainer has nice 3 (the agent's file), all CPUs (usual for every board)"
    )


@pytest.mark.parametrize(
    ("library", "sections", "is_needed"),
    [
        ("torch", {}, True),
        ("onnxruntime", {}, False),
        ("torch", {"data": None, "serve": ServeConfig()}, False),
        ("onnxruntime", {"serve": ServeConfig()}, True),
        ("torch", {"trainer": TrainerConfig(trains=False)}, False),
        ("onnxruntime", {"trainer": TrainerConfig(trains=False)}, True),
    ],
)
def test_a_library_is_needed_by_boards_that_use_it(library, sections, is_needed) -> None:
    config = AgentConfig(**{"device": "a", "state_dir": "s", "data": Data(source="digits"), **sections})
    assert examine.is_library_needed(library, config) == is_needed


def _examined_releases(state_dir, folders) -> tuple[list[str], list[str]]:
    """Return what cannot be served, and for which folders the agent does not start."""
    found = serving.ExaminedReleases(ServeConfig(releases=[str(one) for one in folders]), state_dir)
    return found.damages, found.refusals


def test_a_part_that_is_damaged_is_told_before_the_agent_serves(tmp_path) -> None:
    """Of a folder and of a rollout, by the digest: the size is as it was."""
    manifest, parts = light_release("eels", 3)
    folder = tmp_path / "eels"
    folder.mkdir()
    (folder / MANIFEST).write_bytes(write_manifest(manifest))
    store = BoardStore(tmp_path / "state", reserve_bytes=0)
    for name in (GRAPH, PARAMETERS, PROBES):
        digest = manifest.parts[name].sha256
        (folder / name).write_bytes(parts[digest])
        store.add(digest, parts[digest])
    store.write(SERVED, write_manifest(manifest))
    assert _examined_releases(tmp_path / "state", [folder]) == ([], [])
    for path in (folder / PARAMETERS, store.path(manifest.parameters.sha256)):
        path.chmod(0o600)
        path.write_bytes(bytes(len(path.read_bytes())))
    told = f"eels/3: {PARAMETERS} is damaged: it does not have its digest"
    assert _examined_releases(tmp_path / "state", [folder]) == ([told, told], [])
    (folder / GRAPH).unlink()
    assert f"eels/3: {GRAPH} is gone" in _examined_releases(tmp_path / "none", [folder])[0]
    twice = _examined_releases(tmp_path / "none", [folder, folder])[1]
    assert twice == ["serve.releases: two folders hold model 'eels'; name one of them"]


def test_a_board_that_serves_is_examined_whole(tmp_path, monkeypatch) -> None:
    """A release of a rollout that lost a part, one of a folder, a port that another process has."""
    monkeypatch.setenv("PYTHONPATH", str(grow(tmp_path / "libraries", {"onnxruntime/__init__.py": FAKE})))
    manifest, parts = light_release("digits", 2)
    folder = grow(tmp_path / "digits", {})
    folder.mkdir(exist_ok=True)
    (folder / MANIFEST).write_bytes(write_manifest(manifest))
    for name in (GRAPH, PARAMETERS, PROBES):
        (folder / name).write_bytes(parts[manifest.parts[name].sha256])
    store = BoardStore(tmp_path / "state", reserve_bytes=0)
    brought, _ = light_release("eels", 3)
    store.write(SERVED, write_manifest(brought))
    serve = ServeConfig(releases=[str(folder)], port=free_port(), memory_mb=500)
    config = AgentConfig(device="a", state_dir=str(tmp_path / "state"), data=Data(source="digits"), serve=serve)

    def examined(config: AgentConfig) -> dict[str, str]:
        found = serving.examine_serving(config, profile(), agent_runs=False)
        return {one.name: f"{one.state} {one.finding}" for one in found}

    with socket.create_server(("127.0.0.1", serve.port)):
        told = examined(config)
    assert told["serve: runtime"].endswith(", CPU")
    assert told["serve: port"].startswith("bad")
    assert told["serve: releases"].startswith("warn eels/3; digits/2 of a folder; eels/3: graph")
    assert told["serve: memory"].startswith("ok 500 MiB at most")
    assert "nice 10" in told["serve: settings"]
    broken = msgspec.structs.replace(serve, releases=[str(tmp_path / "none")], socket="/" + 200 * "x")
    told = examined(msgspec.structs.replace(config, serve=broken, data=None))
    assert told["serve: port"].startswith("ok")
    assert told["serve: releases"].startswith("bad")
    assert told["serve: settings"].startswith("bad serve.socket")
