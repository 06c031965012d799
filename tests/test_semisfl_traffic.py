"""Between devices without labels and their server no label, no output of the network and no example passes."""

from __future__ import annotations

import itertools

import pytest
import torch

from edge_server.plan.plan import Plan, share
from shared.codecs import CODECS
from shared.data.load import load
from shared.protocol import payload, wire
from shared.protocol.messages import Features, Update
from shared.protocol.topics import topic
from shared.transfer import frames
from shared.transfer.sender import Sender
from tests.edge_server.fleets import Network, Site
from tests.edge_server.textbook import NAMES
from tests.test_semisupervised_system import FLOAT16, METHODS, OWN, make_plan, pictures
from tests.traffic import SESSION, Secrets, Traffic, recorded

__all__ = ["pictures"]  # a fixture

numbers = itertools.count()
BATCH, CLASSES, STEPS = 8, 10, 3
FEATURES = BATCH * 8 * 4 * 4
"""Numbers of a batch of features: 8 channels of 4 by 4."""
LABELLED = {
    "data": 'source = "npz"\npath = "pictures.npz"',
    "server_data": "",
    "hyper": "batch_size = 8\nlearning_rate = 0.05",
}


def secrets_of(plan: Plan) -> Secrets:
    """Return all examples of the plan's devices."""
    inputs = torch.cat([load(share(plan, plan.device, place)).inputs for place in range(len(NAMES))])
    return Secrets(inputs, CLASSES, BATCH)


def play(network: Network, plan: Plan, folder) -> Traffic:
    """Run a plan with all its devices, and return what passed."""
    here = Site(network, plan, folder, name=f"heard{next(numbers)}")

    async def whole() -> Traffic:
        async with recorded(network, here.name) as traffic:
            async with here.devices(*NAMES):
                await here.serve()
            return traffic

    return network.run(whole())


BOTH, GRADIENT = 2 * FEATURES, FEATURES
PLAIN = 4 * BOTH, 4 * GRADIENT
BYTES = {
    'name = "quantize"\noptions = { bits = 7 }': (BOTH + 2 * 8, GRADIENT + 8),
    FLOAT16: (2 * BOTH + 2, 4 * GRADIENT),
}
"""Of a step's features and of its gradient, without the payloads' headers, by codec at the cut."""


def sizes_of(traffic: Traffic) -> set[tuple[str, int]]:
    """Return how long features and gradients are."""
    return {(channel, size) for channel, size in traffic.sizes() if channel in SESSION}


@pytest.mark.parametrize("network", ["mosquitto", "embedded"], indirect=True)
def test_no_label_output_or_example_is_in_what_passes(network, pictures):
    """Of every payload, decoded; and every round's session passed, so that there was something to find."""
    plan = make_plan(pictures)
    traffic = play(network, plan, pictures)
    heard = [channel for channel, _ in traffic.trees()]
    assert set(heard) == {"model", "update", *SESSION}
    assert heard.count("features") == heard.count("gradient") == plan.rounds * STEPS * len(NAMES)
    assert sizes_of(traffic) == set(zip(("features", "gradient"), PLAIN, strict=True))
    assert secrets_of(plan).leaks(traffic) == []
    metrics = {name for one in traffic.messages() if isinstance(one, Update) for name in one.metrics}
    assert metrics == {"missed_steps", "refused_batches"}


def test_of_the_labels_that_devices_evaluate_on_no_more_than_three_numbers_travel(pictures):
    """Its own evaluation is what the plan lets a device use them for: accuracy, loss and how many it holds back."""
    plan = make_plan(pictures, data=OWN, evaluation="every = 1\ndevices_every = 1")
    traffic = play(Network(), plan, pictures)
    assert secrets_of(plan).leaks(traffic) == []
    metrics = {name for one in traffic.messages() if isinstance(one, Update) for name in one.metrics}
    assert metrics == {"missed_steps", "refused_batches", "eval_accuracy", "eval_loss", "eval_examples"}


@pytest.mark.parametrize("method", ["fedswitch_sl", "supervised_only"])
def test_nor_with_what_is_left_of_it_in_its_ablations(pictures, method):
    """Devices whose student labels are sent one bottom; those that do nothing are sent no tensor, and send none."""
    plan = make_plan(pictures, method)
    traffic = play(Network(), plan, pictures)
    channels = {channel for channel, tree in traffic.trees() if tree}
    assert channels == ({"model", "update", *SESSION} if method == "fedswitch_sl" else set())
    assert secrets_of(plan).leaks(traffic) == []


@pytest.mark.parametrize("method", ["fedswitch", "fedmatch", "semifl"])
def test_nor_where_devices_train_the_whole_network(pictures, method):
    """Parameters go down, changes of them up, and how well a device learned: its loss, and what that is the sum of."""
    plan = make_plan(pictures, method, METHODS[method].removeprefix("least_change = 1e-3, "))
    traffic = play(Network(), plan, pictures)
    channels = [channel for channel, tree in traffic.trees() if tree]
    assert set(channels) == {"model", "update"}
    learned = [one for one in traffic.messages() if isinstance(one, Update) and one.loss]
    assert channels.count("update") == len(learned) >= plan.rounds, "of no two the same bits"
    assert {leak for leak in secrets_of(plan).leaks(traffic) if not leak.startswith("loss: ")} == set()


@pytest.mark.parametrize("cut_codec", BYTES)
def test_features_and_gradients_have_the_bytes_of_the_codec_at_the_cut(pictures, cut_codec):
    """The codec changes nothing of what travels: it is found no sooner in its values than in the floats."""
    plan = make_plan(pictures, cut_codec=cut_codec)
    traffic = play(Network(), plan, pictures)
    assert sizes_of(traffic) == set(zip(("features", "gradient"), BYTES[cut_codec], strict=True))
    assert secrets_of(plan).leaks(traffic) == []


def test_the_same_check_finds_the_labels_that_other_split_learning_sends(pictures):
    plan = make_plan(pictures, "splitfed", "cut = 2, period = 3", **LABELLED)
    assert {leak for leak in secrets_of(plan).leaks(play(Network(), plan, pictures)) if "labels" in leak} == {
        "name: features labels",
        "labels: features labels",
    }


def said(tree: dict[str, torch.Tensor]) -> Traffic:
    """Return what passes where a device sends a tree as features."""
    sender = Sender.of_parts(payload.pack(CODECS["dense"]().encode(tree, None)[0]), 1 << 20)
    whole = b"".join(payload.pack(CODECS["dense"]().encode(tree, None)[0]))
    params = sender.transfer
    offer = Features(run="run", round=1, device="a", start=b"", step=1, params=params)
    name = topic("site", "a", "features")
    return Traffic([(name, wire.encode(offer)), (name, frames.encode(params, 0, [memoryview(whole)]))])


@pytest.mark.parametrize(
    ("kind", "leaf"),
    [
        ("outputs", lambda _: torch.randn(BATCH, CLASSES)),
        ("labels", lambda _: torch.arange(BATCH) % CLASSES),
        ("labels", lambda _: (torch.arange(BATCH) % CLASSES).float()),
        ("example", lambda inputs: inputs[:BATCH]),
        ("example", lambda inputs: inputs[:BATCH].flatten(1)),
        ("example", lambda inputs: inputs[:BATCH].half().flatten(1)),
        ("example", lambda inputs: (inputs[:BATCH] * 255).round().to(torch.uint8).flatten(1)),
        ("example", lambda inputs: torch.randn_like(inputs[:BATCH])),
    ],
)
def test_the_check_finds_what_a_device_could_give_away(pictures, kind, leaf):
    secrets = secrets_of(make_plan(pictures))
    given = leaf(secrets.inputs)
    assert [one.partition(":")[0] for one in secrets.leaks(said({"features": given}))][:1] == [kind]
    assert secrets.leaks(said({"features": torch.randn(BATCH, 4, 8, 8)})) == []
