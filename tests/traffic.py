"""Record all that passes between devices and their server, and find labels, outputs and examples in it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shared.codecs import CODECS
from shared.protocol import payload, wire
from shared.protocol.messages import Features, Gradient, Status, Task, Transfer, Update
from shared.protocol.topics import ALL_BELOW, ROOT, parse_channel
from shared.protocol.wire import AnyMessage
from shared.tensors.tree import Tree, tensor_bytes
from shared.transfer import frames
from shared.transport.base import Delivery
from shared.transport.mqtt import MqttTransport
from tests.edge_server.fleets import Network, until

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
        """Return the channel and the bytes of every payload of which all was heard, by digest."""
        blocks: dict[bytes, dict[int, bytes]] = defaultdict(dict)
        channels = {}
        for topic, body in self.deliveries:
            if frames.is_frame(body):
                one = frames.decode(body)
                blocks[one.digest][one.start] = bytes(one.data)
                channels[one.digest] = parse_channel(topic)
        found = {}
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
