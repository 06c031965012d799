"""What pruned personalization sends: bytes by the formula, nothing personal, and what a server refuses of it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from shared.algorithms.base import Cohort
from shared.algorithms.personal import sparse_update
from shared.algorithms.personal.pruned_personalization import pruned_personalization
from shared.codecs.dense import dense
from shared.codecs.quantize import quantize
from shared.errors import WireError
from shared.models.build import build_blank, build_initial
from shared.protocol import payload
from shared.protocol.messages import Spec
from shared.tensors.tree import Mean, State
from tests.naming import naming
from tests.shared.algorithms.sessions import CNN, FLEET, HYPER, NORMED, SEED, Own, copied, pictures, play


def bytes_of(tree):
    return b"".join(payload.pack(dense().encode(tree, None)[0]))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9, 0.97, 0.98, 1.0])
def test_an_update_takes_the_bytes_of_the_formula(share):
    """4 (N - floor(rho N)) and a bitmap of ceil(N / 8); indices where fewer than one in 32 is kept; nothing at 1."""
    model = build_initial(Spec(name="cnn", options={"width": 4, "hidden": 16}), SEED)
    count, biases = 16 * 392 + 160, 26
    kept = count - int(share * count)
    mask = torch.zeros(count, dtype=torch.bool)
    mask[torch.randperm(count, generator=torch.Generator().manual_seed(1))[:kept]] = True
    shared = {key: leaf for key, leaf in model.tree().items() if key[0] in "79"}
    weights = {key: leaf for key, leaf in shared.items() if leaf.ndim > 1}
    vector = sparse_update.flatten_weights(weights)
    up = sparse_update.pack_sparse(vector, None if kept == count else mask) | {
        k: v for k, v in shared.items() if k not in weights
    }
    expected = 4 * kept + 4 * biases + (0 if kept == count else min(-(-count // 8), 4 * kept))
    if not kept:
        up, expected = {}, 0
    encoded = dense().encode(up, None)[0]
    assert encoded.num_bytes == expected
    sparse_update.require_update(up, shared, weights, share)
    if kept:
        back, held = sparse_update.unpack_sparse(dense().decode(encoded).tree, count)
        assert torch.equal(back, vector * mask)
        assert held is None or torch.equal(held, mask)
    like = sparse_update.outline_update(shared, weights, kept)
    assert {key: leaf.shape for key, leaf in like.items()} == {key: leaf.shape for key, leaf in up.items()}


@pytest.mark.parametrize(("kept", "is_taken"), [(70, False), (71, True), (72, True), (73, False)])
def test_agents_that_counted_in_binary_are_still_understood(kept, is_taken):
    """floor(0.29 * 100) was 28 in binary, so that agents of before keep 72 of 100 where 71 are kept."""
    weights = {"w": torch.ones(10, 10)}
    up = sparse_update.pack_sparse(torch.ones(100), torch.arange(100) < kept)
    if is_taken:
        sparse_update.require_update(up, weights, weights, 0.29)
    else:
        with pytest.raises(WireError):
            sparse_update.require_update(up, weights, weights, 0.29)


@pytest.mark.parametrize("split", ["fc_global", "conv_global"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_nothing_personal_goes_up_or_down(split, share):
    """No two personal numbers in a row are in any payload, nor those that all begin with, nor their names."""
    algorithm = pruned_personalization(split=split)
    played = play(algorithm, 3, values={device: {"prune": share} for device in FLEET})
    begun = build_initial(CNN, SEED).tree()
    travelled = b"".join(bytes_of(tree) for tree in played.down.values())
    travelled += b"".join(bytes_of(result.tree) for result in played.results.values())
    travelled += b"".join(msgspec.msgpack.encode(told) for told in played.told.values())
    for kept in played.devices.values():
        own = {key.removeprefix("personal/"): leaf for key, leaf in kept.tree.items()}
        assert own.keys() == begun.keys() - played.state.tree.keys()
        for key, leaf in own.items():
            assert key.encode() not in travelled
            for numbers in (leaf.flatten(), begun[key].flatten()):
                pairs = (numbers[place : place + 2].numpy().tobytes() for place in range(len(numbers) - 1))
                assert not any(pair in travelled for pair in pairs)


def tampered(up, **leaves):
    return {key: leaf for key, leaf in (up | leaves).items() if leaf is not None}


@pytest.mark.parametrize(
    ("share", "change"),
    [
        (0.5, {"values": torch.zeros(3)}),
        (0.5, {"values": None}),
        (0.5, {"mask": None}),
        (0.5, {"mask": torch.zeros(40, dtype=torch.uint8)}),
        (0.5, {"mask": torch.full((40,), 255, dtype=torch.uint8)}),
        (0.5, {"mask": torch.zeros(39, dtype=torch.uint8)}),
        (0.5, {"index": torch.zeros(158, dtype=torch.int32)}),
        (0.5, {"0.weight": torch.zeros(4, 1, 3, 3)}),
        (0.5, {"7.bias": torch.full((9,), torch.nan)}),
        (0.98, {"index": torch.tensor([3, 3, 4, 5, 6, 7, 8], dtype=torch.int32)}),
        (0.98, {"index": torch.tensor([3, 4, 5, 6, 7, 9, 8], dtype=torch.int32)}),
        (0.98, {"index": torch.tensor([-1, 3, 4, 5, 6, 7, 8], dtype=torch.int32)}),
        (0.98, {"index": torch.tensor([3, 4, 5, 6, 7, 8, 315], dtype=torch.int32)}),
        (1.0, {"values": torch.zeros(1)}),
    ],
)
def test_an_update_that_is_none_is_refused(share, change):
    """One reason, WireError, and nothing added to any mean; by its outline already where that tells."""
    algorithm = pruned_personalization()
    played = play(algorithm, 1, values={device: {"prune": share} for device in FLEET})
    told, down, up = played.told["a"], played.down["a"], played.results["a"].tree
    algorithm.check_update(told, down, up)
    algorithm.check_update(told, down, {key: leaf.to("meta") for key, leaf in up.items()})
    with pytest.raises(WireError):
        algorithm.check_update(told, down, tampered(up, **change))


def test_values_may_be_quantized():
    """q-hat bits a weight: the codec sees values as a leaf, and the mask as integers."""
    played = play(pruned_personalization(), 1)
    up = played.results["c"].tree
    back = quantize(bits=7).decode(quantize(bits=7).encode(up, None)[0]).tree
    assert torch.equal(back["mask"], up["mask"])
    torch.testing.assert_close(back["values"], up["values"], atol=0.02, rtol=0)
    pruned_personalization().check_update(played.told["c"], played.down["c"], back)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), "0.5", [0.5]])
def test_an_allocated_share_that_is_none_is_refused(share):
    algorithm = pruned_personalization()
    state = algorithm.init(build_blank(CNN), 1)
    with pytest.raises(WireError, match=naming("prune", repr(share))) as caught:
        algorithm.assign(state, Cohort(("a",), HYPER, SEED), {"a": {"prune": share}}, 1)
    assert caught.value.reason == "prune"


def test_where_holders_count_alike_none_can_say_that_it_counts_for_more():
    algorithm = pruned_personalization()
    played, mean = play(algorithm, 1, values={device: {"prune": 0.0} for device in FLEET}), Mean()
    for device, result in played.results.items():
        loud = replace(result, weight=1e9 if device == "a" else 1.0)
        mean = algorithm.absorb(mean, device, played.told[device], loud)
    wanted = sum(result.tree["7.bias"] for result in played.results.values()) / len(FLEET)
    torch.testing.assert_close(algorithm.aggregate(played.state, mean).tree["7.bias"], wanted)


@pytest.mark.parametrize("prune", [0.0, 0.5])
def test_weights_of_a_network_of_more_than_ten_layers_come_back_where_they_belong(prune):
    """The server's first state has layer 3 before layer 10, what travels and checkpoints have it behind."""
    algorithm = pruned_personalization(split="all_global", prune=prune, importance="magnitude", global_steps=1)
    state = algorithm.init(build_initial(NORMED, SEED), SEED)
    assert list(state.tree) != sorted(state.tree)
    still = msgspec.structs.replace(HYPER, learning_rate=1e-30)
    told = algorithm.assign(state, Cohort(("a",), still, SEED), {}, 1)["a"]
    down = copied(dict(sorted(state.tree.items())))
    batches = Own(pictures(4, 0, (3, 32, 32)), told)
    _, result = algorithm.local(build_initial(NORMED, SEED), State(), down, batches, told)
    after = algorithm.aggregate(state, algorithm.absorb(Mean(), "a", told, result)).tree
    for name, leaf in state.tree.items():
        if leaf.ndim > 1:
            assert torch.equal(after[name], leaf), name
