"""Doctor's serving checks, each from its inputs and all together."""

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
from device_agent.trainer.processor_share import FROM_CONFIG, choose_share, format_share
from shared.data.spec import Data
from shared.protocol.inference.release import GRAPH, MANIFEST, PARAMETERS, PROBES, write_manifest
from shared.protocol.update import UpdateRecord, advance, take_offer
from tests.device_agent.inference.releases import light_release, offer_of
from tests.machine import free_port, grow, profile
from tests.naming import names_all

FAKE = "__version__ = '1.2.3'\ndef get_available_providers(): return ['CPUExecutionProvider']\n"
"""A library that answers at once; the real one is asked where it serves."""


@pytest.mark.parametrize(
    ("version", "providers", "wanted", "state", "words"),
    [
        ("1.20.1", ["CPUExecutionProvider"], "cpu", "ok", ["1.20.1", "CPU"]),
        ("1.20.1", ["CUDAExecutionProvider", "CPUExecutionProvider"], "cuda", "ok", ["CUDA, CPU"]),
        ("1.20.1", ["CPUExecutionProvider"], "tensorrt", "warn", ["tensorrt", "CPU"]),
        ("1.20.1", [], "cpu", "bad", ["1.20.1"]),
        ("", [], "cpu", "bad", ["[infer]"]),
    ],
)
def test_the_runtime(version, providers, wanted, state, words) -> None:
    check = doctor.check_runtime(version, providers, wanted)
    assert check.state == state
    assert names_all(f"{check.finding} {check.remedy}", *words)


@pytest.mark.parametrize(
    ("port", "refusal", "taken", "runs", "state", "words"),
    [
        (0, "", False, False, "ok", ""),
        (8471, "", False, False, "ok", "127.0.0.1:8471"),
        (8471, "Address already in use", True, False, "bad", "ss -ltnp 'sport = :8471'"),
        (80, "Permission denied", False, False, "bad", "Permission denied"),
        (8471, "Address already in use", True, True, "ok", "127.0.0.1:8471"),
        (8471, "", False, True, "warn", "127.0.0.1:8471"),
    ],
)
def test_the_port(port, refusal, taken, runs, state, words) -> None:
    check = doctor.check_port(port, refusal, is_taken=taken, agent_runs=runs)
    assert check.state == state
    assert words in check.finding + check.remedy


@pytest.mark.parametrize(
    ("limit_mib", "weight_mib", "free_mib", "state", "words"),
    [
        (500, 0, 1000, "ok", ["500 MiB", "96 MiB"]),
        (700, 100, 1000, "ok", ["700 MiB", "496 MiB", "100 MiB"]),
        (95, 0, 1000, "bad", ["memory_mb", "[serve]", "96"]),
        (250, 100, 1000, "bad", ["memory_mb", "[serve]", "696"]),
        (500, 100, 1000, "warn", ["memory_mb", "[serve]", "696"]),
        (700, 100, 200, "warn", ["496 MiB", "200 MiB"]),
        (700, 100, None, "ok", ["700 MiB"]),
    ],
)
def test_the_limit_of_memory(limit_mib, weight_mib, free_mib, state, words) -> None:
    free = None if free_mib is None else free_mib * MIB
    check = doctor.check_serving_memory(limit_mib * MIB, weight_mib * MIB, free)
    assert check.state == state
    assert names_all(f"{check.finding} {check.remedy}", *words)
    assert bool(check.remedy) == (state != "ok")


def record_of(version: int, *events: str, before: UpdateRecord | None = None) -> UpdateRecord:
    record = take_offer(before or UpdateRecord(name="eels"), offer_of(light_release("eels", version)[0]), 0.0)
    for event in events:
        record = advance(record, event, 0.0, "NaN" if event == "refused" else "")
    return record


TO_TRIAL = ("fetched", "verified", "staged", "switched")
SERVED = record_of(3, *TO_TRIAL, "passed")


@pytest.mark.parametrize(
    ("folders", "records", "damages", "refusals", "state", "words"),
    [
        ({}, [], [], [], "ok", []),
        ({"digits": 2}, [SERVED], [], [], "ok", ["eels/3", "digits/2"]),
        ({"eels": 1}, [SERVED], [], [], "ok", ["eels/3"]),
        ({}, [record_of(4, "refused", before=SERVED)], [], [], "ok", ["eels/3", "4", "refused", "NaN"]),
        ({}, [record_of(4, *TO_TRIAL, before=SERVED)], [], [], "ok", ["eels/4", "3"]),
        ({}, [SERVED], ["eels/3: graph is gone"], [], "warn", ["eels/3: graph is gone"]),
        ({}, [SERVED], [], ["no folder"], "bad", ["no folder"]),
    ],
)
def test_the_releases(folders, records, damages, refusals, state, words) -> None:
    check = doctor.check_releases(folders, records, damages, refusals)
    assert check.state == state
    assert names_all(check.finding, *words)
    assert ("digits" in check.finding) == ("digits" in folders)
    assert "eels/1" not in check.finding


def test_settings_are_told_with_who_says_so() -> None:
    told = InferenceSettings(port=1, socket="s", memory_bytes=1, threads=2, spin_us=50, arena=False)
    board = profile(inference=Inference(spin_us=70, origin={"spin_us": "measured"}))
    share = choose_share(TrainerConfig(nice=3), board, {0, 1}, serves=True)
    finding = doctor.describe_settings(told, {"threads": True}, board, share).finding
    assert names_all(finding, 2, FROM_CONFIG, 50, board.id, "measured", "off", format_share(share))


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
    found = serving.ReleaseInventory(ServeConfig(releases=[str(one) for one in folders]), state_dir)
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
        store.parts.add(digest, parts[digest])
    store.write(SERVED, write_manifest(manifest))
    assert _examined_releases(tmp_path / "state", [folder]) == ([], [])
    for path in (folder / PARAMETERS, store.parts.path(manifest.parameters.sha256)):
        path.chmod(0o600)
        path.write_bytes(bytes(len(path.read_bytes())))
    damages, refusals = _examined_releases(tmp_path / "state", [folder])
    assert refusals == []
    assert [names_all(damage, "eels/3", PARAMETERS) for damage in damages] == [True, True]
    (folder / GRAPH).unlink()
    damages, refusals = _examined_releases(tmp_path / "none", [folder, folder])
    assert any(names_all(damage, "eels/3", GRAPH) for damage in damages)
    [twice] = refusals
    assert names_all(twice, "serve.releases", "eels")


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
    assert told["serve: releases"].startswith("warn")
    assert names_all(told["serve: releases"], "eels/3", "digits/2", GRAPH)
    assert told["serve: memory"].startswith("ok 500 MiB")
    assert "nice 10" in told["serve: settings"]
    broken = msgspec.structs.replace(serve, releases=[str(tmp_path / "none")], socket="/" + 200 * "x")
    told = examined(msgspec.structs.replace(config, serve=broken, data=None))
    assert told["serve: port"].startswith("ok")
    assert told["serve: releases"].startswith("bad")
    assert told["serve: settings"].startswith("bad serve.socket")
