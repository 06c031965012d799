"""First weights: the same bits everywhere and for ever, of the distributions that networks train from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn

from shared.errors import ConfigError
from shared.models import MODELS
from shared.models.build import DRAW, TORCHS, build_blank, build_initial, build_zeroed
from shared.models.initial_weights import BLOCK, fill, logarithm, normal, uniform, word_stream
from shared.protocol.messages import Spec
from shared.tensors.generators import seed_torch
from tests.arm.weights import digests

PINNED = Path(__file__).parents[2] / "arm" / "weights.json"
COUNT = 1 << 20
SMALL = Spec(name="vgg13", options={"width": 0.05})


def test_the_bits_of_all_networks_are_those_that_they_have_always_been():
    """What fails here begins a personal model that another version of this program, or another board, began elsewise.

    `make arm` compares the same digests on an emulated board.
    """
    assert digests() == json.loads(PINNED.read_text())
    assert json.loads(PINNED.read_text()).keys() == MODELS.keys()


def test_a_stream_is_philox_with_the_key_of_seed_and_name():
    """The generator's first block is that of its authors' known answers; ours are its words, the lower half first."""
    first = np.random.Philox(key=np.zeros(2, np.uint64), counter=2**256 - 1).random_raw(4)
    known = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert [int(word) for word in first] == known
    assert word_stream(7, "0.weight")(5).tolist() == [0x8E32153F, 0x2CB5D452, 0x9F0DA15A, 0x95E90EE7, 0x978099B4]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**64 - 1, -(2**63)])
def test_every_seed_that_torch_takes_gives_weights(seed):
    spec = Spec(name="mlp", options={"features": 3, "hidden": 2})
    tree = build_initial(spec, seed).tree()
    assert all(leaf.isfinite().all() and leaf.abs().max() > 0 for leaf in tree.values())
    assert torch.equal(build_initial(spec, seed).tree()["1.weight"], tree["1.weight"])


def test_streams_do_not_depend_on_how_they_are_taken_or_on_each_other():
    """Blocks of even size may be joined; parameters have streams of their own, and so do seeds."""
    whole, following = word_stream(3, "a")(2 * BLOCK), word_stream(3, "a")
    assert np.array_equal(whole, np.concatenate([following(BLOCK), following(BLOCK)]))
    for other in (word_stream(4, "a"), word_stream(3, "b")):
        assert abs(np.corrcoef(whole, other(2 * BLOCK))[0, 1]) < 5 / math.sqrt(2 * BLOCK)


def test_uniform_numbers_are_evenly_spaced_between_both_ends():
    ends = uniform(np.array([0, 2**31 - 1, 2**31, 2**32 - 1], np.uint32))
    assert ends.tolist() == [2**-33 - 0.5, -(2**-33), 2**-33, 0.5 - 2**-33]


def test_normal_numbers_are_the_quantiles_to_seven_digits():
    """Against the standard library's, which has sixteen; at both ends, at the seams between parts, and all over."""
    seam = round((0.5 + 0.425) * 2**32)
    ends = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, seam - 1, seam, seam + 1, 2**32 - seam]
    some = np.concatenate([np.array(ends, np.uint32), word_stream(1, "some")(20_000)])
    expected = [NormalDist().inv_cdf((int(k) + 0.5) / 2**32) for k in some]
    np.testing.assert_allclose(normal(some), expected, rtol=3e-7)


def test_logarithms_have_ten_digits():
    numbers = np.array([2.0**-33, 3 * 2.0**-33, 0.01, 0.074999, 0.49999, 0.5, 0.75, 0.9999])
    np.testing.assert_allclose(logarithm(numbers), np.log(numbers), rtol=0, atol=2e-10)


def test_normal_numbers_have_the_moments_and_the_distribution_of_the_normal_one():
    """A million: each moment within five standard errors; Kolmogorov's distance below 1.95 / sqrt(n), which chance
    passes once in a thousand times."""
    drawn = np.sort(normal(word_stream(5, "sample")(COUNT)))
    root = math.sqrt(COUNT)
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((drawn**power).mean() - moment) < 5 * math.sqrt(variance) / root
    distribution = torch.special.ndtr(torch.from_numpy(drawn)).numpy()
    steps = np.arange(COUNT + 1) / COUNT
    assert max((steps[1:] - distribution).max(), (distribution - steps[:-1]).max()) < 1.95 / root
    assert (
        abs(
            np.corrcoef(normal(word_stream(5, "sample")(COUNT))[:-1], normal(word_stream(5, "sample")(COUNT))[1:])[0, 1]
        )
        < 5 / root
    )


def test_a_network_of_hes_rule_has_normal_weights_and_no_biases():
    """2 / fan_in, and 1 / fan_in in the last layer: eq. 10 of the paper."""
    layers = build_initial(Spec(name="alexnet", options={"width": 0.25, "hidden": 512}), 2).layers
    kinds = [layer for layer in layers if isinstance(layer, nn.Conv2d | nn.Linear)]
    for layer in kinds:
        weight, fan_in = layer.weight.double(), layer.weight[0].numel()
        variance = (1 if layer is layers[-1] else 2) / fan_in
        spread = 5 * math.sqrt(2 / weight.numel())
        assert weight.square().mean().item() / variance == pytest.approx(1, abs=spread)
        assert abs(weight.mean().item()) < 5 * math.sqrt(variance / weight.numel())
        assert layer.bias.count_nonzero() == 0
    assert len(kinds) == 8


def test_other_networks_are_uniform_within_torchs_own_bounds():
    """Weights and biases within 1 / sqrt(fan_in), which the largest of many come close to."""
    for layer in build_initial(Spec(name="cnn"), 2).layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fan_in, count = layer.weight[0].numel(), layer.weight.numel()
            bound = 1 / math.sqrt(fan_in)
            assert bound * (1 - 20 / count) < layer.weight.abs().max() <= bound
            assert 0 < layer.bias.abs().max() <= bound
            assert layer.weight.square().mean().item() * 3 / bound**2 == pytest.approx(1, abs=5 / math.sqrt(count))


@pytest.mark.parametrize("name", ["resnet20", "lenet"])
def test_what_normalises_begins_as_torchs_does(name):
    ours, torchs = (build_initial(Spec(name=name), 2, draw).tree() for draw in (DRAW, TORCHS))
    assert {key: (leaf.shape, leaf.dtype, leaf.stride()) for key, leaf in ours.items()} == {
        key: (leaf.shape, leaf.dtype, leaf.stride()) for key, leaf in torchs.items()
    }
    drawn = {key for key in ours if not torch.equal(ours[key], torchs[key])}
    assert drawn == {key for key, leaf in ours.items() if leaf.ndim > 1 or (name == "lenet" and key.endswith("bias"))}
    layers = build_initial(Spec(name=name), 2).layers
    assert all(weight.requires_grad for weight in layers.parameters())


def test_the_draw_of_runs_before_is_torchs_seeded_generator():
    """What a run without a word on it began with, on this machine at least."""
    with seed_torch(9):
        expected = [nn.Linear(64, 32), nn.Linear(32, 10)]
    found = build_initial(Spec(name="mlp"), 9, TORCHS).layers
    assert torch.equal(found[1].weight, expected[0].weight)
    assert torch.equal(found[3].weight, expected[1].weight)
    assert build_initial(Spec(name="mlp"), 9, TORCHS).draw == TORCHS
    assert build_initial(Spec(name="mlp"), 9).draw == DRAW


def test_a_draw_of_a_later_version_is_refused():
    with pytest.raises(ConfigError, match="'threefry'"):
        build_initial(SMALL, 1, "threefry")


def test_a_layer_of_an_unknown_kind_is_refused():
    """Rather than left as it lies in memory."""
    with pytest.raises(TypeError, match="PReLU"):
        fill(nn.Sequential(nn.PReLU()), 1, he_normal=False)


def test_zeros_wait_for_weights():
    """Nothing is drawn; what normalises is as it must be."""
    before = torch.random.get_rng_state()
    model = build_zeroed(SMALL)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not any(weight.count_nonzero() for weight in model.layers.parameters())
    assert model.tree().keys() == build_blank(SMALL).tree().keys()
    assert all(leaf.eq(1).all() for key, leaf in model.tree().items() if key.endswith("running_var"))
