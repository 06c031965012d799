"""Frozen layers, adapters and pretrained weights in whole runs: against loops in plain torch, and what travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import AnyRecord, Evaluated, RoundClosed, RunOpened, UpdateAccepted, closed_rounds
from edge_server.learner import initial_network, plan_algorithm
from edge_server.plan.plan import Plan, devices
from edge_server.replay.run import replay_plan
from edge_server.replay.trace.export import trace_of
from edge_server.rounds.pretrained import require_same_weights
from edge_server.rounds.run import build_membership
from shared.algorithms.base import join_network
from shared.data.load import load as load_examples
from shared.errors import ConfigError
from shared.models.adaptation import is_adapter
from shared.models.build import DRAW, build_blank, build_initial
from shared.models.cost import trained_share
from shared.models.evaluate import score
from shared.protocol.messages import ADAPTATION, TASK_FIELDS, derive_seed
from shared.protocol.topics import EVERYONE, topic
from shared.tensors.tree import Tree
from shared.tensors.weights_file import digest_weights
from tests.edge_server.fleets import End, Network, Site
from tests.edge_server.harness import RUN
from tests.edge_server.textbook import NAMES, make_plan, require_equal, shares
from tests.naming import naming

LARGE = 'name = "mlp"\noptions = { features = 8, hidden = 64, classes = 3 }'
FREEZE = f'{LARGE}\nfreeze = ["1"]'
LORA = "rank = 2\nalpha = 4.0"
FROZEN = {"1.weight", "1.bias"}
BASE_BYTES = 4 * (64 * 8 + 64)
HEAD_BYTES = 4 * (3 * 64 + 3)
ADAPTER_BYTES = 4 * 2 * (64 + 8 + 3 + 64)
WHOLE_BYTES = BASE_BYTES + HEAD_BYTES
HEADER_BYTES = 500


def trained_loop(plan: Plan, network: nn.Module, state: Tree, trained: list[str]) -> Tree:
    """FedAvg over some parameters of a network, as a textbook has it."""
    for number in range(1, plan.rounds + 1):
        total, examples_count = {name: torch.zeros_like(state[name]) for name in trained}, 0
        for device, examples in zip(devices(plan), shares(plan), strict=True):
            network.load_state_dict(state)
            sgd = torch.optim.SGD(
                [network.get_parameter(name) for name in trained],
                lr=plan.hyper.learning_rate,
                momentum=plan.hyper.momentum,
            )
            order = torch.Generator().manual_seed(derive_seed(plan.seed, number, device.name))
            for _ in range(plan.hyper.local_epochs):
                for index in torch.randperm(len(examples), generator=order).split(plan.hyper.batch_size):
                    sgd.zero_grad()
                    functional.cross_entropy(network(examples.inputs[index]), examples.labels[index]).backward()
                    sgd.step()
            for name in trained:
                total[name] += (network.get_parameter(name).detach() - state[name]) * len(examples)
            examples_count += len(examples)
        state = state | {name: state[name] + total[name] / examples_count for name in trained}
    return state


class TextbookLora(nn.Linear):
    """A linear layer with an adapter, as the paper writes it."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__(features, out)
        self.lora_a, self.lora_b = nn.Parameter(torch.zeros(2, features)), nn.Parameter(torch.zeros(out, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + 2.0 * (inputs @ self.lora_a.T) @ self.lora_b.T


def carried(records: list) -> list[dict[str, list[float]]]:
    """Return the bytes that each update's task took down and up, by round."""
    accepted = [record for record in records if isinstance(record, UpdateAccepted)]
    rounds = sorted({record.round for record in accepted})
    return [
        {
            way: [getattr(record.update.cost, f"bytes_{way}") for record in accepted if record.round == number]
            for way in ("down", "up")
        }
        for number in rounds
    ]


def between(values: list[float], least: int) -> bool:
    return all(least <= value <= least + HEADER_BYTES for value in values)


def test_frozen_layers_are_a_loop_without_them(tmp_path):
    """To 1e-6 of the textbook's; frozen leaves to the bit; they go down once, and never up."""
    plan = make_plan(tmp_path, model=FREEZE)
    state, records = replay_plan(plan, tmp_path / "run")
    first = build_initial(plan.model, plan.seed).tree()
    network = nn.Sequential(nn.Flatten(), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    expected = trained_loop(plan, network, first, ["3.weight", "3.bias"])
    assert all(torch.equal(state.tree[name], first[name]) for name in FROZEN)
    for name, leaf in expected.items():
        torch.testing.assert_close(state.tree[name], leaf, rtol=1e-6, atol=1e-6)
    assert not torch.equal(state.tree["3.weight"], first["3.weight"])
    for number, ways in enumerate(carried(records), start=1):
        assert between(ways["up"], HEAD_BYTES)
        assert between(ways["down"], HEAD_BYTES + (BASE_BYTES if number == 1 else 0))


def test_adapters_are_a_textbook_loop_and_travel_alone(tmp_path):
    """Without them, every round carries the whole network both ways: here four times as much."""
    plan = make_plan(tmp_path, lora=LORA)
    state, records = replay_plan(plan, tmp_path / "run")
    first = initial_network(plan, DRAW).tree()
    network = nn.Sequential(nn.Flatten(), TextbookLora(8, 64), nn.ReLU(), TextbookLora(64, 3))
    expected = trained_loop(plan, network, first, [name for name in first if is_adapter(name)])
    for name, leaf in expected.items():
        torch.testing.assert_close(state.tree[name], leaf, rtol=1e-5, atol=1e-6)
        assert is_adapter(name) or torch.equal(leaf, first[name])
    for number, ways in enumerate(carried(records), start=1):
        assert between(ways["up"], ADAPTER_BYTES)
        assert between(ways["down"], ADAPTER_BYTES + (WHOLE_BYTES if number == 1 else 0))
    whole = carried(replay_plan(make_plan(tmp_path), tmp_path / "whole")[1])
    assert all(between(ways[way], WHOLE_BYTES) for ways in whole for way in ways)


class Counting(SqliteStore):
    """A store that calls a function at the end of each round."""

    def __init__(self, folder: Path, call: Callable[[int], None]) -> None:
        super().__init__(folder, durable=False)
        self.call = call

    def extend(
        self,
        records: Sequence[AnyRecord],
        payloads: Mapping[str, bytes] = MappingProxyType({}),
        *,
        may_wait: bool = False,
    ) -> None:
        super().extend(records, payloads, may_wait=may_wait)
        for record in records:
            if isinstance(record, RoundClosed):
                self.call(record.round)


def test_the_server_sends_frozen_leaves_once_to_all_devices_and_again_to_one_that_lost_them(tmp_path):
    """Bytes of all frames, on the common topic and on the devices' own: heads are in tasks; in round 3, one base."""
    plan = make_plan(tmp_path, rounds=4, model=FREEZE)
    here, sizes, shared = Site(Network(), plan, tmp_path / "live"), list[int](), list[int]()

    async def whole() -> End:
        async with here.network.memory.subscribe(topic(here.name, "+", "model")) as frames, here.devices(*NAMES):

            def count(number: int) -> None:
                sent = [*frames.drain()]
                sizes.append(sum(len(data) for _, data in sent))
                shared.append(sum(len(data) for name, data in sent if name == topic(here.name, EVERYONE, "model")))
                for base in (here.folder / "a").rglob("bases/*") if number == 2 else ():
                    base.unlink()

            return await here.serve(Counting(here.folder / RUN, count))

    state, _ = here.network.run(whole())
    again, _ = replay_plan(plan, tmp_path / "replayed" / RUN)
    require_equal(state.tree, again.tree)
    for found, bases in ((sizes, [1, 0, 1, 0]), (shared, [1, 0, 0, 0])):
        assert all(between([size], BASE_BYTES) if base else size == 0 for size, base in zip(found, bases, strict=True))


def test_a_trace_costs_what_was_recorded_and_a_plan_without_adapters_more(tmp_path):
    """By the operations of a step; the devices, their links and the data are the same."""
    plan = make_plan(tmp_path, lora=LORA)
    _, records = replay_plan(plan, tmp_path / "run")
    trace = trace_of(records)
    _, repeated = replay_plan(plan, tmp_path / "repeated", trace=trace)
    _, whole = replay_plan(make_plan(tmp_path), tmp_path / "whole", trace=trace)
    recorded, again, full = (
        [record.update.cost.compute_s for record in each if isinstance(record, UpdateAccepted)]
        for each in (records, repeated, whole)
    )
    assert again == recorded
    share = trained_share(plan.model, (8,), plan.adaptation)
    assert full == pytest.approx([seconds / share for seconds in recorded])


def test_what_is_tested_and_released_has_the_adapters_merged(tmp_path):
    """The server's accuracy is that of the network with adapters; so is the devices', by trainer and ONNX Runtime."""
    pytest.importorskip("onnx")
    found = []
    for runtime in ("torch", "onnx"):
        plan = make_plan(
            tmp_path,
            lora=f'{LORA}\ntrain = ["3"]\nlayers = ["1"]',
            evaluation=f'every = 1\ndevices_every = 3\nruntime = "{runtime}"',
        )
        plan = msgspec.structs.replace(plan, data=msgspec.structs.replace(plan.data, holdout=0.2))
        state, records = replay_plan(plan, tmp_path / runtime / "run")
        found.append([record for record in records if isinstance(record, Evaluated)][-1])
    tree = join_network(plan_algorithm(plan), build_blank(plan.model), state)
    assert tree.keys() == build_blank(plan.model).tree().keys()
    test = load_examples(msgspec.structs.replace(plan.data, split="test", holdout=0.0))
    model = initial_network(plan, DRAW)
    with_adapters = score(model.layers, {name: state.tree[name] for name in model.tree()}, test)
    merged = score(build_blank(plan.model).layers, tree, test)
    assert merged.loss == pytest.approx(with_adapters.loss, rel=1e-6)
    assert closed_rounds(records)[-1].accuracy == merged.accuracy
    assert found[0].accuracy == found[1].accuracy


@pytest.mark.parametrize("algorithm", ["fedprox", "hcef", "scaffold", "fedadam", "fedavgm", "fedyogi", "fedadagrad"])
@pytest.mark.parametrize("sections", [{"model": FREEZE}, {"lora": LORA}], ids=["freeze", "lora"])
def test_methods_of_one_network_leave_frozen_leaves_alone(tmp_path, algorithm, sections):
    """And learn by the others; codec top-k where updates are changes."""
    codec = 'name = "dense"' if algorithm == "scaffold" else 'name = "topk"\noptions = { share = 0.5 }'
    hyper = "local_epochs = 2\nbatch_size = 8\nlearning_rate = 0.1"
    plan = make_plan(tmp_path, algorithm=f'name = "{algorithm}"', codec=codec, hyper=hyper, **sections)
    state, records = replay_plan(plan, tmp_path / "run")
    first = initial_network(plan, DRAW).tree()
    frozen = FROZEN if "model" in sections else {name for name in first if not is_adapter(name)}
    changed = {name for name in first if not torch.equal(state.tree[name], first[name])}
    assert changed == first.keys() - frozen
    assert not any(name.partition("/")[2] in frozen for name in state.tree), "no moments of frozen leaves"
    losses = [record.loss for record in closed_rounds(records)]
    assert losses[-1] < losses[0]


def test_frozen_statistics_are_not_measured_again(tmp_path):
    """Others are, in the session after each round."""
    data = 'source = "digits"\nlimit = 200'
    model = 'name = "spu_emnist"\noptions = { side = 8, width = 4, classes = 10 }\nfreeze = ["0", "1"]'
    hyper = "batch_size = 16\nlearning_rate = 0.05"
    plan = make_plan(tmp_path, rounds=2, model=model, data=data, hyper=hyper)
    state, records = replay_plan(plan, tmp_path / "run")
    first = build_initial(plan.model, plan.seed).tree()
    assert {name for name in first if torch.equal(state.tree[name], first[name])} == {
        name for name in first if name.startswith(("0.", "1."))
    }
    assert closed_rounds(records)[-1].statistics_batches


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_run_begins_with_the_weights_of_a_file(tmp_path, suffix):
    """Its digest is in the record, and a resumed run with another content is refused."""
    weights = build_initial(make_plan(tmp_path).model, 99).tree()
    path = tmp_path / f"w.{suffix}"
    save_file(weights, path) if suffix == "safetensors" else torch.save(weights, path)
    plan = make_plan(tmp_path, model=f'{LARGE}\nweights = "w.{suffix}"\nfreeze = ["1"]')
    assert plan.model.weights == str(path)
    state, records = replay_plan(plan, tmp_path / "run")
    assert all(torch.equal(state.tree[name], weights[name]) for name in FROZEN)
    [begun] = [record for record in records if isinstance(record, RunOpened)]
    assert begun.weights == digest_weights(path)
    require_same_weights(begun)
    torch.save({name: leaf + 1 for name, leaf in weights.items()}, path)
    with pytest.raises(ConfigError, match=naming("model.weights", begun.weights[:12])):
        require_same_weights(begun)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"model": f'{LARGE}\nweights = "absent.pt"'}, ("model.weights", "absent.pt")),
        ({"model": f'{LARGE}\nweights = "other.pt"'}, ("model.weights", "5x8", "64x8")),
        ({"model": f'{LARGE}\nweights_skip = ["3"]'}, ("weights_skip",)),
        ({"model": f'{LARGE}\nfreeze = ["2"]'}, ("model.freeze", "'2'")),
        ({"model": FREEZE, "algorithm": 'name = "fedspu"'}, ("model.freeze", "fedspu", "fedavg")),
        ({"model": FREEZE, "algorithm": 'name = "fedsl"\noptions = { cut = 1 }'}, ("model.freeze", "fedsl", "fedavg")),
        ({"lora": LORA, "algorithm": 'name = "fedselect"'}, ("lora", "fedselect", "fedavg")),
        ({"lora": "rank = 0"}, ("rank",)),
        (
            {"model": f'{LARGE}\nweights = "own.pt"', "algorithm": 'name = "local_only"', "evaluation": "every = 0"},
            ("model.weights", "local_only"),
        ),
    ],
)
def test_plans_that_cannot_be_are_refused_when_they_are_checked(tmp_path, sections, named):
    for name, hidden in (("other", 5), ("own", 64)):
        layers = nn.Sequential(nn.Flatten(), nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        torch.save(layers.state_dict(), tmp_path / f"{name}.pt")
    with pytest.raises(ConfigError, match=naming(*named)):
        make_plan(tmp_path, **sections)


def test_older_agents_take_no_part(tmp_path):
    """They would train all of the network, or miss the leaves that are not in a task's parameters."""
    plan = make_plan(tmp_path, model=FREEZE)
    assert build_membership(plan, plan_algorithm(plan), (None, None), []).needs == {ADAPTATION}
    assert ADAPTATION in TASK_FIELDS
    whole = make_plan(tmp_path)
    assert not build_membership(whole, plan_algorithm(whole), (None, None), []).needs
