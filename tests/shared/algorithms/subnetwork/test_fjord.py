"""FjORD: widths drawn for each batch, statistics of each width, means from wide to narrow, distillation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.early_stopping import STOPPED
from shared.algorithms.subnetwork.fjord import fjord
from shared.algorithms.subnetwork.fjord_device import Nested
from shared.algorithms.subnetwork.fjord_fixed import fjord_fixed
from shared.algorithms.subnetwork.fjord_widths import Widths, parse_widths
from shared.codecs import CODECS
from shared.errors import WireError
from shared.models.base import Model
from shared.models.build import build_initial
from shared.protocol.messages import Assignment, Spec
from shared.registry import build
from shared.subnetworks.neurons import first_neurons
from shared.tensors.tree import State
from tests.shared.algorithms.dropouts import HYPER, Site, bare, network, same
from tests.shared.algorithms.sessions import MLP, Own, examples

SHARES = {"a": 0.5, "b": 0.25, "c": 1.0, "d": 0.5}
WIDTHS = "0.25,0.5,1"
NORMS = ("1", "4", "8")
STATISTICS = ("running_mean", "running_var")


def still() -> Model:
    """Return the network without its Dropout."""
    model = network()
    model.layers[9].p = 0.0
    return model


def block(site: Site, key: str, share: float) -> tuple[slice, ...]:
    """Return where the numbers of a width are in a leaf."""
    both = site.layout.index(first_neurons(site.layout.hidden, share))[key]
    place = tuple(slice(None) if chosen is None else slice(len(chosen)) for chosen in both)
    return place[: site.state.tree[key].ndim]


def test_widths_are_shares_that_ascend_to_one():
    every = parse_widths("0.25, 0.5,1")
    assert every == Widths((0.25, 0.5, 1.0))
    assert [every.largest_within(share) for share in (0.1, 0.25, 0.49, 0.5, 0.99, 1.0)] == [0, 0, 0, 1, 1, 2]
    assert parse_widths("0.1,0.3,1").largest_within(0.1 + 0.2) == 1
    assert [every.statistic_name("1.running_var", width) for width in range(3)] == [
        "1.running_var@0",
        "1.running_var@1",
        "1.running_var",
    ]


@pytest.mark.parametrize("bad", ["", "1,0.5", "0.5", "0.5,0.5,1", "0,1", "-1,1", "a,1", "nan,1", "0.5,1,2", 0.5])
def test_other_widths_are_refused(bad):
    with pytest.raises(ValueError, match=r"widths|convert"):
        fjord(widths=bad)


def test_what_goes_down_is_the_own_width_and_the_statistics_of_all_up_to_it():
    site = Site(fjord(widths=WIDTHS), SHARES)
    site.tell("abcd")
    for device, widths in (("a", 2), ("b", 1), ("c", 3)):
        down, hidden = bare(site.down[device]), first_neurons(site.layout.hidden, SHARES[device])
        assert down["3.weight"].shape[:2] == (len(hidden["3"]), len(hidden["0"]))
        names = [f"{norm}.{name}{mark}" for norm in NORMS for name in STATISTICS for mark in ("@0", "@1", "")[:widths]]
        assert sorted(key for key in down if "running" in key) == sorted(names)
        own = down["8.running_var" + ("@0", "@1", "")[widths - 1]]
        assert len(own) == len(down["8.weight"]) == len(hidden["7"])
    with pytest.raises(WireError) as caught:
        Nested.from_download(network(), site.down["a"], parse_widths(WIDTHS), 0)
    assert caught.value.reason == "unknown-tensor"
    with pytest.raises(WireError):
        Nested.from_download(network(), site.down["a"] | {"8.running_var@0": torch.zeros(9)}, parse_widths(WIDTHS), 1)


def test_a_network_of_a_width_is_the_first_neurons_of_the_whole():
    """Outputs and gradients of every width, against the whole network with all others zero; no Dropout here."""
    site = Site(fjord(widths=WIDTHS), {"c": 1.0})
    site.tell("c")
    inputs, labels = examples((1, 6, 6), 12).inputs, examples((1, 6, 6), 12).labels
    for width, share in enumerate((0.25, 0.5, 1.0)):
        model = still()
        nested = Nested.from_download(model, site.down["c"], parse_widths(WIDTHS), 2)
        outputs = nested(width, inputs)
        functional.cross_entropy(outputs, labels).backward()
        index = site.layout.index(first_neurons(site.layout.hidden, share))
        leaves = {}
        for key in index:
            whole, place = torch.zeros_like(site.state.tree[key]), block(site, key, share)
            whole[place] = site.state.tree[key][place]
            leaves[key] = whole.requires_grad_("running" not in key)
        expected = functional_call(model.layers.train(), leaves, (inputs,))
        functional.cross_entropy(expected, labels).backward()
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
        for key, leaf in nested.leaves.items():
            if leaf.grad is not None:
                only = torch.zeros_like(leaf)
                only[block(site, key, share)] = leaves[key].grad[block(site, key, share)]
                torch.testing.assert_close(leaf.grad, only, rtol=1e-3, atol=1e-5)


def test_widths_are_drawn_alike_for_each_batch_and_by_the_tasks_seed():
    drawn = []

    class Watched(Nested):
        def __call__(self, width, inputs):
            drawn.append(width)
            return self.leaves["10.bias"].expand(len(inputs), 3)

    site = Site(fjord(widths=WIDTHS), {"c": 1.0, "a": 0.5})
    site.tell("ca")
    hyper = msgspec.structs.replace(HYPER, local_epochs=60, batch_size=8, learning_rate=1e-6)
    for device, own, count in (("c", 2, 3), ("a", 1, 2)):
        twice = []
        for _ in range(2):
            drawn.clear()
            told = Assignment(seed=4, hyper=hyper)
            nested = Watched.from_download(still(), site.down[device], parse_widths(WIDTHS), own)
            nested.train(Own(examples((1, 6, 6), 20), told), told, distil=False)
            twice.append(list(drawn))
        assert twice[0] == twice[1]
        assert len(drawn) == 180
        for width in range(count):  # of 180 draws, within four standard deviations
            assert abs(Counter(drawn)[width] - 180 / count) < 4 * (180 * (1 / count) * (1 - 1 / count)) ** 0.5
        assert set(drawn) == set(range(count))


def test_each_width_moves_its_own_statistics_alone():
    """Those of widths that were not drawn come back as they went."""
    site = Site(fjord(widths=WIDTHS), {"c": 1.0})
    site.tell("c")
    nested = Nested.from_download(still(), site.down["c"], parse_widths(WIDTHS), 2)
    before = {key: leaf.detach().clone() for key, leaf in nested.leaves.items()}
    nested(1, examples((1, 6, 6), 12).inputs)
    for key, leaf in nested.leaves.items():
        assert torch.equal(leaf, before[key]) != key.endswith("@1")


def test_means_are_taken_from_wide_to_narrow():
    """As the authors do it: each nested block, the widest first, becomes the mean over the devices that reach it."""
    site = Site(fjord(widths=WIDTHS), SHARES)
    before = {key: leaf.clone() for key, leaf in site.state.tree.items()}
    results = site.round("abd")
    for key in site.layout.leaves:
        if "running" in key:
            continue
        expected = before[key].clone()
        for share in (1.0, 0.5, 0.25):
            reach = [results[device] for device in results if SHARES[device] >= share]
            if reach:
                place = block(site, key, share)
                total = sum(result.weight for result in reach)
                expected[place] = sum(result.weight * result.tree[key][place] for result in reach) / total
        torch.testing.assert_close(site.state.tree[key], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(site.state.tree[key][-1], before[key][-1]) == (not key.startswith("10"))
    for norm in NORMS:
        for name in STATISTICS:
            key = f"{norm}.{name}"
            assert torch.equal(site.state.tree[key], before[key])
            for mark, devices in (("@0", "abd"), ("@1", "ad")):
                total = sum(results[device].weight for device in devices)
                mean = sum(results[device].weight * results[device].tree[key + mark] for device in devices) / total
                torch.testing.assert_close(site.state.tree[key + mark], mean, rtol=1e-5, atol=1e-6)


def test_a_codec_that_sends_single_values_covers_them_alone_in_the_statistics_of_each_width_too():
    """By `masked` with a mean over holders; what nobody sent stays as it was."""
    codec = build(CODECS, Spec(name="masked", options={"dims": 1, "coverage": "holders"}), "codec")
    site = Site(fjord(widths=WIDTHS), SHARES)
    site.tell("abc")
    before, results = {key: leaf.clone() for key, leaf in site.state.tree.items()}, {}
    for device in "abc":
        result = site.train(device)
        for name in STATISTICS:
            result.tree[f"1.{name}@0"][0] = 0
        result.tree["4.running_mean@0"][0] = float(device == "a")
        coded = codec.decode(codec.encode(result.tree, None)[0])
        results[device] = replace(result, tree=coded.tree, coverage=coded.coverage)
    site.fold(results)
    after = site.state.tree
    for name in STATISTICS:
        assert after[f"1.{name}@0"][0] == before[f"1.{name}@0"][0]
        mean = sum(one.weight * one.tree[f"8.{name}@0"] for one in results.values())
        torch.testing.assert_close(after[f"8.{name}@0"], mean / sum(one.weight for one in results.values()))
    assert after["4.running_mean@0"][0] == 1


def test_with_one_width_it_is_the_simplified_one(play, fleet):
    """Bit for bit, over rounds."""
    one, two = play(fjord(widths="1"), fleet, 3).tree, play(fjord_fixed(), fleet, 3).tree
    assert same(one, two)


@pytest.mark.parametrize("distil", [False, True])
def test_distillation_trains_the_own_width_as_well_and_teaches_the_drawn_one(distil):
    """One step by hand: with it the labels teach the widest, whose outputs teach the one drawn."""
    site = Site(fjord(widths=WIDTHS), {"c": 1.0})
    site.tell("c")
    data = examples((1, 6, 6), 12)
    for seed in (1, 2, 3):
        told = Assignment(seed=seed, hyper=msgspec.structs.replace(HYPER, local_epochs=1, batch_size=64))
        width = int(torch.randint(3, (), generator=torch.Generator().manual_seed(seed)))
        got, by_hand = (Nested.from_download(still(), site.down["c"], parse_widths(WIDTHS), 2) for _ in range(2))
        ((inputs, labels),) = Own(data, told)
        said = loss = functional.cross_entropy(by_hand(width, inputs), labels)
        if distil:
            outputs = by_hand(2, inputs)
            said = functional.cross_entropy(outputs, labels)
            soft = torch.softmax(outputs, 1).detach()
            loss = said - (soft * torch.log_softmax(by_hand(width, inputs), 1)).sum(1).mean()
        loss.backward()
        assert got.train(Own(data, told), told, distil=distil) == pytest.approx(said.item())
        for key, leaf in by_hand.leaves.items():
            if leaf.grad is not None:
                torch.testing.assert_close(got.leaves[key], leaf - 0.1 * leaf.grad, rtol=1e-4, atol=1e-5)


def test_a_device_uses_its_width_with_the_statistics_of_that_width():
    """The whole network's layers take it; early stopping judges that very network."""
    site = Site(fjord(widths=WIDTHS, early_stopping=True), SHARES)
    site.round("ad")
    site.tell("ab")
    for device, width in (("a", 1), ("b", 0)):
        down = site.down[device]
        served = site.algorithm.personal.parameters(network(), State(), down, site.told[device])
        assert served.keys() == site.layout.leaves.keys()
        assert torch.equal(served["8.running_mean"], down[f"8.running_mean@{width}"])
        functional_call(network().layers.eval(), served, (site.data("a").inputs,))
    assert site.results["a"].metrics[STOPPED] == 0.0


def test_a_server_that_judges_the_whole_network_is_not_troubled_by_other_widths(model):
    """Its state holds statistics that the network has not: they are passed over."""
    site = Site(fjord(widths=WIDTHS), SHARES)
    inputs, layers = site.data("a").inputs, network().layers.eval()
    common = {key: leaf for key, leaf in site.state.tree.items() if "@" not in key}
    assert torch.equal(functional_call(layers, site.state.tree, (inputs,)), functional_call(layers, common, (inputs,)))
    plain = fjord().init(build_initial(MLP, 5), 5).tree
    assert plain.keys() == model().tree().keys()
