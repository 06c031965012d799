"""A few bytes that stand for many numbers: refused by what they say of themselves, before they take memory."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from edge_server.rounds.check_update import check_stored_update, read_update
from edge_server.rounds.split.top_model import TopModel
from shared.codecs import CODECS
from shared.codecs.base import MOST_BYTES, Codec
from shared.errors import WireError
from shared.models.build import build_blank
from shared.protocol.messages import Blob, Payload, Room, Spec, Update
from shared.protocol.payload import pack
from shared.tensors.tree import State, Tree
from shared.transfer import frames
from shared.transfer.frames import MAX_FRAME_BYTES
from shared.transfer.in_memory import MemorySink
from shared.transfer.receiver import Policy, Receiver
from shared.transfer.sender import Sender
from tests.edge_server.textbook import plain

UPDATE = Update(run="trial", round=1, device="a", params=None, weight=1.0)
TREE: Tree = {"w": torch.eye(8), "b": torch.ones(8), "n": torch.tensor(3)}
CODED = ["dense", "float16", "quantize", "masked", "topk", "chain"]


def stored(payload: Payload) -> memoryview:
    """Return a payload's bytes, writable as those of a mapped file."""
    return memoryview(bytearray(b"".join(pack(payload))))


@pytest.mark.parametrize("name", CODED)
def test_an_outline_is_what_decoding_gives_without_storage(name):
    codec: Codec = CODECS[name]()
    payload, _ = codec.encode(TREE, None)
    outline = codec.outline(payload)
    assert all(leaf.is_meta for leaf in outline.values())
    told = {key: (leaf.shape, leaf.dtype) for key, leaf in outline.items()}
    assert told == {key: (leaf.shape, leaf.dtype) for key, leaf in codec.decode(payload).tree.items()}


@pytest.mark.parametrize("name", CODED)
def test_an_honest_update_is_taken_and_a_number_that_is_none_is_not(name):
    codec: Codec = CODECS[name]()
    check_stored_update(stored(codec.encode(TREE, None)[0]), codec, TREE)
    content = stored(codec.encode(TREE | {"w": torch.full((8, 8), torch.nan)}, None)[0])
    with pytest.raises(WireError) as caught:
        check_stored_update(content, codec, TREE)
    assert caught.value.reason == "not-finite"


@pytest.mark.parametrize("name", CODED)
def test_a_method_says_itself_what_its_updates_look_like(name):
    """It is asked before anything is decoded, of leaves without storage; numbers must be numbers still."""
    codec, asked = CODECS[name](), []

    def accepts(down: Tree, up: Tree) -> None:
        asked.append((down, all(leaf.is_meta for leaf in up.values())))
        if up["w"].shape != (4, 8):
            raise WireError("not half of it", reason="shape")

    half = {"w": TREE["w"][:4]}
    check_stored_update(stored(codec.encode(half, None)[0]), codec, TREE, accepts)
    assert asked[0] == (TREE, True)
    for bad, reason in (({"w": TREE["w"]}, "shape"), ({"w": torch.full((4, 8), torch.inf)}, "not-finite")):
        with pytest.raises(WireError) as caught:
            check_stored_update(stored(codec.encode(bad, None)[0]), codec, TREE, accepts)
        assert caught.value.reason == reason


@pytest.mark.parametrize("name", ["masked", "chain"])
def test_a_bitmap_of_zeros_does_not_become_the_tensors_it_stands_for(name):
    """64 KiB that stand for half a million float64: decoding them takes 4 MiB, refusing them less than a tenth."""
    codec: Codec = CODECS[name]()
    count = 1 << 19
    content = stored(codec.encode({"w": torch.zeros(count // 8, 8, dtype=torch.float64)}, None)[0])
    assert content.nbytes < count // 8 + 1024
    assert read_update(content, UPDATE, codec).tree["w"].nbytes == 8 * count
    tracemalloc.start()
    try:
        with pytest.raises(WireError) as caught:
            check_stored_update(content, codec, TREE)
        assert tracemalloc.get_traced_memory()[1] < count // 8, "numpy tells tracemalloc of the bits that it unpacks"
    finally:
        tracemalloc.stop()
    assert caught.value.reason == "shape"


def test_values_of_a_chain_are_no_more_than_its_bits():
    """The codec below is asked for their outline first: of four float64 a byte."""
    codec, count = CODECS["chain"](quantize_bits=1), 1 << 20
    many, _ = CODECS["quantize"](bits=1).encode({"w": torch.ones(count, dtype=torch.float64)}, None)
    honest, _ = codec.encode({"w": torch.ones(2, 2, dtype=torch.float64)}, None)
    inner = {f"quantize/{name}": blob for name, blob in many.blobs.items()}
    content = stored(Payload(codec="chain", blobs=honest.blobs | inner))
    tracemalloc.start()
    try:
        with pytest.raises(WireError) as refused:
            read_update(content, UPDATE, codec)
        assert refused.value.reason == "shape"
        assert tracemalloc.get_traced_memory()[1] < count // 8
    finally:
        tracemalloc.stop()


def test_features_stand_for_no_more_than_a_gibibyte():
    """16 MiB of a bitmap that would be more: refused as oversized, by the server's part of a split network."""
    count = 8 * MOST_BYTES // 64 + 8
    blobs = {
        "~features": Blob("f64", (0, count // 8, 8), memoryview(b"")),
        "bitmap": Blob("u8", (count // 8,), memoryview(bytes(count // 8))),
        "dense/features": Blob("f64", (0,), memoryview(b"")),
    }
    parts = pack(Payload(codec="masked", blobs=blobs))
    sent, policy = Sender.of_parts(parts, MAX_FRAME_BYTES), Policy(64, 1.0, MOST_BYTES)
    receiving = Receiver(sent.transfer, MemorySink, policy, policy.pace(0.0), 0.0)
    for data in sent.push(Room(blocks=sent.transfer.blocks, frame_bytes=MAX_FRAME_BYTES), 2 * MAX_FRAME_BYTES)[1]:
        receiving.take(frames.decode(data), 0.0)
    top = TopModel(plain(), build_blank(Spec(name="mlp")), State(), CODECS["masked"](), {}, seed=0, before=0)
    with pytest.raises(WireError) as caught:
        top.read("a", receiving)
    assert caught.value.reason == "oversized"
