"""One task in process: what it refuses, and that the next task does not suffer from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from device_agent.exchange import outbox
from device_agent.trainer.workspace import Workspace
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Result
from shared.codecs import CODECS
from shared.codecs.dense import to_blob
from shared.data.sources.arrays import NO_LABEL
from shared.data.spec import Data
from shared.errors import ConfigError, Superseded, WireError
from shared.protocol import payload
from shared.protocol.messages import Assignment, Blob, Hyper, Payload, Spec
from shared.tensors.tree import Tree
from tests.device_agent.agent_side import update_of
from tests.naming import names_all, naming


def like(**changes: torch.Tensor) -> Tree:
    tree = {
        "1.weight": torch.zeros(8, 4),
        "1.bias": torch.zeros(8),
        "3.weight": torch.zeros(2, 8),
        "3.bias": torch.zeros(2),
    }
    return tree | changes


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (like(**{"9.weight": torch.zeros(1)}), "unknown-tensor"),
        (like(**{"1.weight": torch.zeros(4, 8)}), "shape"),
        (like(**{"1.weight": torch.zeros(1 << 16)}), "shape"),
        (like(**{"1.weight": torch.zeros(8, 4, dtype=torch.float64)}), "dtype"),
        (like(**{"1.weight": torch.zeros(8, 4, dtype=torch.int32)}), "dtype"),
        (like(**{"1.bias": torch.full((8,), float("nan"))}), "not-finite"),
        (like(**{"1.bias": torch.tensor([0.0] * 7 + [float("-inf")])}), "not-finite"),
    ],
)
def test_parameters_of_another_model_are_refused(device, make_task, tree: Tree, reason: str) -> None:
    """With the reason under which the server would count the same; the draft holds no update; the next task works."""
    with pytest.raises(WireError) as caught:
        device.perform(make_task(), params=device.params(tree))
    assert caught.value.reason == reason
    assert not (device.folder / "outbox" / ".trial@000001" / outbox.UPDATE).exists()
    assert update_of(device.perform(make_task())).num_examples == 30


def test_parameters_that_lack_a_layer_are_refused(device, make_task) -> None:
    """FedAvg trains the whole model; a part of it is an error of the server's, not a model half at random."""
    tree = like()
    del tree["3.bias"]
    with pytest.raises(WireError, match=r"3\.bias"):
        device.perform(make_task(), params=device.params(tree))


def test_a_method_with_labels_is_refused_where_the_device_reads_none(device, make_task) -> None:
    with pytest.raises(ConfigError, match="'fedavg'"):
        device.perform(make_task(), data=Data(source="digits", labels="none"))


def test_a_method_without_labels_reads_none_even_where_the_device_has_some(
    device, make_task, monkeypatch, caplog
) -> None:
    """It says so once. What is held back for evaluation is not trained on all the same."""
    seen = list[int]()

    def local(_model, state, start, batches, _told):
        seen.extend(label for _, labels in batches for label in labels.tolist())
        return state, Result({key: torch.zeros_like(leaf) for key, leaf in start.items()}, 1.0, len(seen))

    blind = replace(ALGORITHMS["fedavg"](), local=local, reads_labels=False)
    monkeypatch.setitem(ALGORITHMS, "blind", lambda: blind)
    for number in (1, 2):
        device.perform(make_task(algorithm=Spec(name="blind"), round=number))
    assert set(seen) == {NO_LABEL}
    assert len(seen) == 2 * 30
    [said] = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert names_all(said, "'blind'", 'data.labels = "none"')


def test_what_an_earlier_trainer_of_the_device_said_is_not_said_again(device, make_task, monkeypatch, caplog) -> None:
    """A trainer is ended when it is idle: else every other round would say that its labels are not read."""

    def local(_model, state, start, _batches, _told):
        return state, Result({key: torch.zeros_like(leaf) for key, leaf in start.items()}, 1.0, 1)

    monkeypatch.setitem(ALGORITHMS, "mute", lambda: replace(ALGORITHMS["fedavg"](), local=local, reads_labels=False))
    for number in (1, 2):
        device.workspace = Workspace()
        device.perform(make_task(algorithm=Spec(name="mute"), round=number))
    assert len(caplog.records) == 1


def test_a_network_is_not_built_for_parameters_that_are_not_its_own(device, make_task) -> None:
    """A payload of 44 bytes had one of gigabytes built first."""
    vast = Spec(name="mlp", options={"features": 4, "hidden": 200_000_000, "classes": 2})
    with pytest.raises(WireError, match=naming("'1.bias'")):
        device.perform(make_task(model=vast), params=device.params({}))
    with pytest.raises(WireError) as caught:
        device.perform(make_task(model=vast))
    assert caught.value.reason == "shape"
    assert "network" not in device.workspace.latest


def test_a_network_for_which_there_is_no_memory_is_not_built(device, make_task) -> None:
    """Also where a method sends a part of it, so that no shape tells."""
    vast = Spec(name="mlp", options={"features": 4, "hidden": 1 << 40, "classes": 2})
    with pytest.raises(ConfigError, match=naming("model mlp", "MiB")):
        device.perform(make_task(model=vast, algorithm=Spec(name="local_only")), params=device.params({}))
    assert "network" not in device.workspace.latest


@pytest.mark.parametrize(
    ("line", "named"), [("1,2,3,0", ["table.csv", "(3,)"]), ("1,2,3,4,7", ["table.csv", 2, 7, "`classes`", 8])]
)
def test_examples_that_do_not_fit_fail_the_task_in_our_words(device, make_task, line: str, named: list) -> None:
    """With the path and what to change; torch's own words name neither."""
    path = device.folder / "table.csv"
    path.write_text(",".join([*"abcdefg"[: line.count(",")], "label"]) + f"\n{line}\n{line}\n")
    with pytest.raises(ConfigError, match=naming(*named)):
        device.perform(make_task(), data=Data(source="csv", path=str(path)))


def test_examples_that_do_not_fit_are_told_once_more(device, make_task, examples) -> None:
    """What was looked at once is remembered, what was refused is not."""
    path = device.folder / "table.csv"
    path.write_text("a,b,c,d,label\n1,2,3,4,7\n")
    bad = Data(source="csv", path=str(path))
    for _ in range(2):
        with pytest.raises(ConfigError, match=naming(path, 2, 7)):
            device.perform(make_task(), data=bad)
    assert update_of(device.perform(make_task(), data=examples)).num_examples == 30


def test_examples_that_were_deleted_meanwhile_fail_the_task(device, make_task, examples) -> None:
    """They had been read once, and nobody looked again; they are read anew when they are back."""
    path = device.folder / "copy.csv"
    path.write_bytes(Path(examples.path).read_bytes())
    mine = msgspec.structs.replace(examples, path=str(path))
    device.perform(make_task(), data=mine)
    path.rename(device.folder / "away.csv")
    with pytest.raises(ConfigError, match=r"copy\.csv"):
        device.perform(make_task(), data=mine)
    (device.folder / "away.csv").rename(path)
    assert update_of(device.perform(make_task(), data=mine)).num_examples == 30


def test_a_class_that_the_run_does_not_know_fails_the_task(device, make_task) -> None:
    """Also where the device could not tell its classes when it connected."""
    path = device.folder / "table.csv"
    path.write_text("a,b,c,d,label\n1,2,3,4,cat\n4,3,2,1,bird\n")
    task = make_task(assignment=Assignment(seed=3, hyper=Hyper(batch_size=8), classes=["cat", "dog"]))
    with pytest.raises(ConfigError, match=naming("'bird'", "bird, cat", "cat, dog")):
        device.perform(task, data=Data(source="csv", path=str(path)))


@pytest.mark.parametrize("data", [b"", b"FP", b"nonsense" * 40, b"FP\x01\x00\xff\xff\xff\xff"])
def test_bytes_that_are_no_parameters_are_refused(device, make_task, data: bytes) -> None:
    path = device.folder / "junk"
    path.write_bytes(data)
    with pytest.raises(WireError):
        device.perform(make_task(), params=str(path))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"algorithm": Spec(name="fedmagic")}, ["algorithm", "'fedmagic'"]),
        ({"algorithm": Spec(name="fedprox", options={"nu": 1})}, ["'fedprox'", "'nu'"]),
        ({"algorithm": Spec(name="fedprox", options={"mu": -1.0})}, ["mu", "-1.0"]),
        ({"model": Spec(name="gpt")}, ["model", "'gpt'"]),
        ({"codec": Spec(name="zip")}, ["codec", "'zip'"]),
    ],
)
def test_what_this_agent_does_not_know_is_named(device, make_task, fields, named: list) -> None:
    """An older agent meets a newer server: the failure says what is missing."""
    with pytest.raises(ConfigError, match=naming(*named)):
        device.perform(make_task(**fields))


def test_a_payload_of_a_codec_nobody_knows_is_named(device, make_task) -> None:
    path = device.folder / "zipped"
    blobs = {key: to_blob(leaf) for key, leaf in like().items()}
    path.write_bytes(b"".join(payload.pack(Payload(codec="zip", blobs=blobs))))
    with pytest.raises(ConfigError, match=naming("codec", "'zip'")):
        device.perform(make_task(), params=str(path))


@pytest.mark.parametrize(("algorithm", "reason"), [("fedavg", "shape"), ("local_only", "oversized")])
def test_a_few_bytes_that_stand_for_many_zeros_take_no_memory(device, make_task, algorithm: str, reason: str) -> None:
    """By a codec that sends few of them; where a method takes any leaves, by what one payload may stand for."""
    path, blobs = device.folder / "sparse", CODECS["topk"](share=0.01).encode({"1.weight": torch.eye(9)}, None)[0].blobs
    vast = Blob("f32", (0, 1 << 15, 1 << 15), memoryview(b""))
    path.write_bytes(b"".join(payload.pack(Payload(codec="topk", blobs=blobs | {"~1.weight": vast}))))
    with pytest.raises(WireError) as caught:
        device.perform(make_task(algorithm=Spec(name=algorithm)), params=str(path))
    assert caught.value.reason == reason


def test_a_superseded_task_ends_at_the_next_batch(device, make_task) -> None:
    """Three batches are asked for before the newer task comes; no update is written, and the next task is not hurt."""
    answers = iter([False, False, False, True])
    reference = (device.perform(make_task(round=9)) / outbox.PAYLOAD).read_bytes()
    with pytest.raises(Superseded):
        device.perform(make_task(), superseded=lambda: next(answers))
    assert next(answers, None) is None
    assert not (device.folder / "outbox" / ".trial@000001" / outbox.UPDATE).exists()
    assert (device.perform(make_task(round=9)) / outbox.PAYLOAD).read_bytes() == reference


def test_a_superseded_task_of_a_method_that_chooses_its_examples_ends_at_the_next_ones(device, make_task) -> None:
    """SemiFL takes examples by place, not the batches of its task; it is asked there as well."""
    answers = iter([*9 * [False], True])
    task = make_task(algorithm=Spec(name="semifl", options={"threshold": 0.01, "epochs": 50}))
    with pytest.raises(Superseded):
        device.perform(task, superseded=lambda: next(answers))
    assert next(answers, None) is None


def test_examples_that_are_absent_fail_the_task_with_their_path(device, make_task, examples) -> None:
    absent = msgspec.structs.replace(examples, path=str(device.folder / "absent.csv"))
    with pytest.raises(ConfigError, match=r"absent\.csv"):
        device.perform(make_task(), data=absent)
