"""FedSelect: what becomes a device's own, how far that grows, whose mean is taken."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from shared.algorithms.early_stopping import STOPPED
from shared.algorithms.fedavg import fedavg, local_sgd
from shared.algorithms.fedselect import BEFORE, CHOSEN, OWN, Growth, fedselect
from shared.codecs import CODECS
from shared.protocol.messages import Spec
from shared.registry import build
from shared.tensors.tree import State
from tests.shared.algorithms.dropouts import HYPER, Site, network, same
from tests.shared.algorithms.sessions import Own

SHARES = {"a": 1.0, "b": 1.0}
STEADY = msgspec.structs.replace(HYPER, local_epochs=2, momentum=0.9, weight_decay=0.01)


def part(state: State, prefix: str):
    return {key.removeprefix(prefix): leaf for key, leaf in state.tree.items() if key.startswith(prefix)}


def owned(site: Site, device: str) -> dict[str, int]:
    return {key: int(mask.sum()) for key, mask in part(site.devices[device], CHOSEN).items()}


def sizes() -> dict[str, int]:
    return {key: leaf.numel() for key, leaf in network().tree().items() if key.endswith(".weight")}


def test_at_first_all_is_common_and_what_moved_most_becomes_ones_own():
    """A plain training from what came; then, in every tensor of weights, the quarter that moved furthest."""
    site = Site(fedselect(), SHARES)
    site.tell("a")
    result = site.train("a")
    told, start = site.told["a"], {key: leaf.clone() for key, leaf in site.down["a"].items()}
    with torch.random.fork_rng():
        torch.manual_seed(told.seed)
        moved = local_sgd(network(6), State(), start, Own(site.data("a"), told), told)[1].tree
    for key, mask in part(site.devices["a"], CHOSEN).items():
        order = sorted(range(mask.numel()), key=lambda place: (-moved[key].flatten()[place].abs().item(), place))
        expected = set(order[: math.floor(0.25 * mask.numel())])
        assert {place for place, own in enumerate(mask.flatten().tolist()) if own} == expected, key
    assert not any(key.endswith(".bias") for key in part(site.devices["a"], CHOSEN))
    for key, leaf in result.tree.items():
        torch.testing.assert_close(leaf, start[key] + moved[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("every", [1, 2])
def test_what_is_ones_own_grows_to_half_and_never_shrinks(every):
    """By a share of what is common, tensor by tensor, until exactly the limit."""
    growth = Growth(0.25, 0.3, 0.5, every)
    site = Site(fedselect(begin=0.25, grow=0.3, most=0.5, every=every), SHARES, STEADY)
    expected, before = dict.fromkeys(sizes(), 0), {}
    for times in range(5):
        site.round("a")
        for key, size in sizes().items():
            more = math.floor(0.3 * (size - expected[key]))
            if times == 0:
                expected[key] = math.floor(0.25 * size)
            elif times % every == 0:
                expected[key] = min(expected[key] + more, math.floor(0.5 * size))
        assert owned(site, "a") == expected
        now = part(site.devices["a"], CHOSEN)
        assert all(bool((now[key] | ~mask).all()) for key, mask in before.items())
        before = now
    if every == 1:  # tensors of so few weights that a share of them is none stay behind
        assert all(expected[key] == math.floor(0.5 * size) for key, size in sizes().items() if size > 10)
    assert growth.count(100, 50, 4) == 0
    assert growth.count(100, 49, 4) == 1


def test_growth_takes_what_has_moved_furthest_since_it_grew_last():
    site = Site(fedselect(grow=0.2), SHARES, STEADY)
    site.round("ab")
    first = site.devices["a"]
    site.round("ab")
    own, since = part(site.devices["a"], OWN), part(first, BEFORE)
    for key, mask in part(first, CHOSEN).items():
        assert torch.equal(since[key], part(first, OWN)[key]) or not mask.any()
        gained = part(site.devices["a"], CHOSEN)[key] & ~mask
        moved = (own[key] - since[key]).abs()
        if gained.any() and not gained[~mask].all():
            assert moved[gained].min() >= moved[~mask & ~gained].max()
        assert torch.equal(part(site.devices["a"], BEFORE)[key], own[key] if gained.any() else since[key])


def test_ones_own_stay_and_the_others_are_replaced_by_what_comes():
    """Without an epoch, a second task shows the merge; zeros go up in place of one's own."""
    site = Site(fedselect(), SHARES)
    site.round("ab")
    before = site.devices["a"]
    site.tell("a")
    site.told["a"] = msgspec.structs.replace(site.told["a"], hyper=msgspec.structs.replace(HYPER, local_epochs=0))
    result = site.train("a")
    own, chosen, kept = part(site.devices["a"], OWN), part(before, CHOSEN), part(before, OWN)
    for key, leaf in site.down["a"].items():
        if key in chosen:
            assert torch.equal(own[key], torch.where(chosen[key], kept[key], leaf))
            assert torch.equal(result.tree[key], leaf.masked_fill(chosen[key], 0))
        else:
            assert torch.equal(own[key], leaf)


@pytest.mark.parametrize("epoch", [1, 2])
def test_epochs_train_ones_own_and_the_common_weights_in_turn(epoch):
    """With momentum and decay: after one epoch of two the common weights are as merged, to the bit; then they move."""

    class Short(Own):
        def __iter__(self):
            for number, batch in enumerate(super().__iter__()):
                if number * 4 < epoch * 12:  # 10 examples in batches of 4 make three of an epoch
                    yield batch

    site = Site(fedselect(), SHARES, STEADY)
    site.round("ab")
    before = site.devices["a"]
    site.tell("a")
    told = site.told["a"]
    after, _ = site.algorithm.local(network(6), before, site.down["a"], Short(site.data("a"), told), told)
    own, chosen, kept = part(after, OWN), part(before, CHOSEN), part(before, OWN)
    for key, leaf in own.items():
        came = site.down["a"][key]
        if key in chosen:
            assert not torch.equal(leaf[chosen[key]], kept[key][chosen[key]]) or not chosen[key].any()
            assert torch.equal(leaf[~chosen[key]], came[~chosen[key]]) == (epoch == 1), key
        elif key.endswith(".bias"):
            assert torch.equal(leaf, came) == (epoch == 1)


def test_a_task_of_one_epoch_trains_both_at_once():
    site = Site(fedselect(), SHARES, msgspec.structs.replace(STEADY, local_epochs=1))
    site.round("ab")
    before = site.devices["a"]
    site.round("ab")
    own, chosen, kept = part(site.devices["a"], OWN), part(before, CHOSEN), part(before, OWN)
    for key, mask in chosen.items():
        assert not torch.equal(own[key][~mask], site.down["a"][key][~mask])
        assert not torch.equal(own[key][mask], kept[key][mask]) or not mask.any()


@pytest.mark.parametrize("codec", ["dense", "masked"])
def test_means_are_over_those_for_whom_a_weight_is_common(codec):
    """By brute force, as the updates travel; a weight that is everybody's own stays what it was."""
    through = build(CODECS, Spec(name=codec), "codec")
    site = Site(fedselect(begin=0.4), SHARES)
    site.round("ab")
    chosen = {device: part(site.devices[device], CHOSEN) for device in "ab"}
    site.tell("ab")
    before, results = {key: leaf.clone() for key, leaf in site.state.tree.items()}, {}
    for device in "ab":
        result = site.train(device)
        coded = through.decode(through.encode(result.tree, None)[0])
        results[device] = type(result)(coded.tree, result.weight, result.num_examples, coverage=coded.coverage)
    site.fold(results)
    nobody = 0
    for key, leaf in before.items():
        if not leaf.is_floating_point():
            assert torch.equal(site.state.tree[key], leaf)
            continue
        for place in range(leaf.numel()):
            holders = [d for d in "ab" if key not in chosen[d] or not chosen[d][key].flatten()[place]]
            got = site.state.tree[key].flatten()[place].item()
            if not holders:
                nobody += 1
                assert got == leaf.flatten()[place].item()
                continue
            total = sum(results[d].weight for d in holders)
            mean = sum(results[d].weight * results[d].tree[key].flatten()[place].item() for d in holders) / total
            assert got == pytest.approx(mean, rel=1e-5, abs=1e-6)
    assert nobody


def test_as_published_whole_models_travel_and_the_masked_codec_saves_ones_own():
    """4 bytes a number both ways; with the codec, one bit a weight and nothing for one's own."""
    site = Site(fedselect(), SHARES)
    site.round("a")
    site.round("a")
    floats = {key: leaf for key, leaf in network().tree().items() if leaf.is_floating_point()}
    count = sum(leaf.numel() for leaf in floats.values())
    assert sum(leaf.nbytes for leaf in site.down["a"].values() if leaf.is_floating_point()) == 4 * count
    dense, masked = (build(CODECS, Spec(name=name), "codec") for name in ("dense", "masked"))
    up = site.results["a"].tree
    assert dense.encode(up, None)[0].num_bytes == 4 * count
    matrices = {key: leaf for key, leaf in up.items() if leaf.ndim > 1}
    zeros = sum(int((leaf == 0).sum()) for leaf in matrices.values())
    assert zeros == sum(math.floor(0.25 * leaf.numel()) for leaf in matrices.values())
    bits = sum(leaf.numel() for leaf in matrices.values())
    assert masked.encode(up, None)[0].num_bytes == 4 * (count - zeros) + -(-bits // 8)


def test_without_a_choice_it_is_fedavg(play, fleet):
    """To the tolerance of floats: values are averaged, not changes."""
    got, expected = play(fedselect(begin=0.0, grow=0.0), fleet, 3).tree, play(fedavg(), fleet, 3).tree
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_device_uses_its_own_model_and_before_that_what_came():
    site = Site(fedselect(early_stopping=True), SHARES)
    site.round("a")
    told, down = site.told["a"], site.down["a"]
    assert same(
        site.algorithm.personal.parameters(network(), site.devices["a"], down, told), part(site.devices["a"], OWN)
    )
    assert same(site.algorithm.personal.parameters(network(), State(), down, told), down)
    assert site.results["a"].metrics[STOPPED] == 0.0
    assert site.devices["a"].facts["participations"] == 1


@pytest.mark.parametrize("bad", [{"begin": 0.6}, {"begin": -0.1}, {"most": 1.5}, {"grow": 2.0}, {"every": 0}])
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        fedselect(**bad)
