"""Between devices without labels and their server no label, no output of the network and no example passes.

All that passes between them is recorded, and looked through.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from edge_server.plan.data import device_data
from edge_server.plan.plan import Plan
from shared.codecs import CODECS
from shared.data.load import load
from shared.protocol import payload, wire
from shared.protocol.messages import Features, Gradient, Status, Task, Transfer, Update
from shared.protocol.topics import ALL_BELOW, ROOT, parse_channel, topic
from shared.protocol.wire import AnyMessage
from shared.tensors.tree import Tree, tensor_bytes
from shared.transfer import frames
from shared.transfer.sender import Sender
from shared.transport.base import Delivery
from shared.transport.mqtt import MqttTransport
from tests.edge_server.fleets import Network, Site, until
from tests.edge_server.textbook import NAMES
from tests.test_semisupervised_system import FLOAT16, METHODS, OWN, make_plan, pictures

SESSION = {"features", "gradient"}
"""Channels of what is computed of a batch; the others carry parameters."""
WORDS = ("label", "target", "logit", "class")


@dataclass
class Traffic:
    """What was published on a site's topics, in order."""

    deliveries: list[Delivery] = field(default_factory=list)

    def messages(self) -> Iterator[AnyMessage]:
        """Yield every message, each of them once."""
        bodies = dict.fromkeys(body for _, body in self.deliveries if body and wire.is_message(body))
        return map(wire.decode, bodies)

    def transfers(self) -> dict[bytes, Transfer]:
        """Return all payloads that were offered, by digest."""
        kinds = (Task, Update, Features, Gradient)
        offered = (one.params for one in self.messages() if isinstance(one, kinds) and one.params)
        return {one.digest: one for one in offered}

    def payloads(self) -> dict[bytes, tuple[str, bytes]]:
        """Return the channel and the bytes of every payload of which all was heard, inside a message or in frames."""
        blocks: dict[bytes, dict[int, bytes]] = defaultdict(dict)
        channels = {}
        for name, body in self.deliveries:
            if frames.is_frame(body):
                one = frames.decode(body)
                blocks[one.digest][one.start] = bytes(one.data)
                channels[one.digest] = parse_channel(name)
        found = {}
        for message in self.messages():
            if isinstance(message, Task | Update) and message.payload and message.params:
                found[message.params.digest] = "model" if isinstance(message, Task) else "update", message.payload
        for digest, transfer in self.transfers().items():
            whole = bytearray(transfer.size)
            for start, data in blocks[digest].items():
                whole[start * frames.BLOCK_BYTES : start * frames.BLOCK_BYTES + len(data)] = data
            if payload.digest([memoryview(whole)]) == digest:
                found[digest] = channels[digest], bytes(whole)
        return found

    def trees(self) -> Iterator[tuple[str, Tree]]:
        """Yield the channel and the tensors of every payload, decoded."""
        for channel, data in self.payloads().values():
            packed = payload.unpack(memoryview(bytearray(data)))
            yield channel, CODECS[packed.codec]().decode(packed).tree

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the channel and the bytes of every payload, without its header and the gaps between its blobs."""
        for channel, data in self.payloads().values():
            yield channel, payload.unpack(memoryview(data)).num_bytes

    @property
    def is_whole(self) -> bool:
        """Whether all of every payload that was offered was heard."""
        return self.payloads().keys() == self.transfers().keys()


@asynccontextmanager
async def recorded(network: Network, site: str) -> AsyncIterator[Traffic]:
    """Record all topics of a site while the block lasts, and until every payload is there."""
    found = Traffic()
    transport = MqttTransport(network.broker, f"{site}.recorder") if network.broker else network.memory
    async with transport.running() if isinstance(transport, MqttTransport) else _as_it_is():
        if isinstance(transport, MqttTransport):
            await transport.connected.wait()
        async with transport.subscribe(f"{ROOT}/{site}/{ALL_BELOW}") as inbox:
            inbox.divert(found.deliveries.append)
            yield found
            await until(lambda: found.is_whole)


@asynccontextmanager
async def _as_it_is() -> AsyncIterator[None]:
    await asyncio.sleep(0)
    yield


@dataclass(frozen=True)
class Secrets:
    """What must not travel.

    Attributes:
        inputs: Examples as a network is given them, of shape (N, ...), pictures in [0, 1].
        classes: Outputs of the network.
        batch: Most examples of a step.
    """

    inputs: Tensor
    classes: int
    batch: int

    def leaks(self, traffic: Traffic) -> list[str]:
        """Return what was found, a kind of leak and where; each once."""
        found = [leak for channel, tree in traffic.trees() for leak in self._in_tree(channel, tree)]
        found += [f"classes: {one.device}" for one in traffic.messages() if isinstance(one, Status) and one.classes]
        found += [f"loss: {one.device}" for one in traffic.messages() if isinstance(one, Update) and one.loss]
        found += self._in_bytes(
            [*(body for _, body in traffic.deliveries), *(d for _, d in traffic.payloads().values())]
        )
        return list(dict.fromkeys(found))

    def _in_tree(self, channel: str, tree: Tree) -> Iterator[str]:
        for name, leaf in tree.items():
            place = f"{channel} {name}"
            if any(word in name for word in WORDS):
                yield f"name: {place}"
            if leaf.ndim and len(leaf) <= self.batch and leaf[0].numel() == self.classes and leaf.ndim > 1:
                yield f"outputs: {place}"
            if leaf.shape[1:].numel() and leaf.shape[1:] in {self.inputs.shape[1:], self.inputs[0].squeeze().shape}:
                yield f"example: {place}"
            if leaf.ndim == 1 and self._are_labels(leaf) and (channel in SESSION or not leaf.is_floating_point()):
                yield f"labels: {place}"

    def _are_labels(self, leaf: Tensor) -> bool:
        """Tell whether a vector could be a batch's labels: as long at most, and of whole numbers that are classes."""
        values = leaf.double()
        return 0 < len(leaf) <= self.batch and bool(((values % 1 == 0) & (values >= 0) & (values < self.classes)).all())

    def _in_bytes(self, runs: list[bytes]) -> Iterator[str]:
        """Find the middle of each example's middle row, as floats of 32 and 16 bits and as bytes."""
        everything = b"\0".join(runs)
        rows = self.inputs.flatten(1, -2)[:, self.inputs.flatten(1, -2).shape[1] // 2]
        middles = rows[:, rows.shape[1] // 4 : -(rows.shape[1] // 4)]
        forms = {
            "float32": middles,
            "float16": middles.half(),
            "uint8": torch.from_numpy(np.rint(middles.numpy() * 255).astype(np.uint8)),
        }
        for form, ones in forms.items():
            if any(bytes(tensor_bytes(one)) in everything for one in ones):
                yield f"example: bytes of {form}"


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
    inputs = torch.cat([load(device_data(plan, plan.device, place)).inputs for place in range(len(NAMES))])
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
