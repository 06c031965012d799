"""Devices that prune once: their choice stays, both ways carry the part alone, means are over those who hold."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.early_stopping import STOPPED
from shared.algorithms.fedavg import fedavg
from shared.algorithms.subnetwork.fedspu import fedspu
from shared.algorithms.subnetwork.hermes import hermes
from shared.codecs.dense import dense
from shared.errors import TaskFailed, WireError
from shared.subnetworks.neurons import (
    PREFIX,
    all_neurons,
    count_active,
    count_parameters,
    extract,
    pack,
    spread,
    unpack,
)
from shared.tensors import file
from shared.tensors.tree import State
from tests.shared.algorithms.dropouts import HYPER, Site, bare, network, require_mean, same
from tests.shared.algorithms.sessions import Own

SHARES = {"a": 0.5, "b": 0.3, "c": 1.0, "d": 0.75}


def chosen(site: Site, device: str):
    return unpack(site.devices[device].tree, site.layout.hidden)


def names(active) -> dict[str, list[int]]:
    return {name: neurons.tolist() for name, neurons in active.items()}


def test_the_first_time_all_comes_and_ever_after_the_part_alone():
    """What comes belongs to the choice, bit for bit the server's; bitmaps go up once."""
    site = Site(hermes(), SHARES)
    site.round("ab")
    first = {device: chosen(site, device) for device in "ab"}
    for device in "ab":
        everybody = site.layout.index(all_neurons(site.layout.hidden))
        assert same(bare(site.down[device]), extract(network().tree(), everybody))
        marks = {key: leaf for key, leaf in site.results[device].tree.items() if key.startswith(PREFIX)}
        assert same(marks, pack(first[device], site.layout.hidden))
    for _ in range(2):
        before = site.state.tree
        site.round("ab")
        for device in "ab":
            index = site.layout.index(first[device])
            assert same(bare(site.down[device]), extract(before, index))
            assert site.results[device].tree.keys() == index.keys()
            assert same(bare(site.devices[device].tree), site.results[device].tree)
            assert names(chosen(site, device)) == names(first[device])


def test_the_choice_outlives_devices_and_servers(tmp_path):
    """A device that lost its state has the same part; a server that reads its state from disk knows of it."""
    site = Site(hermes(), SHARES)
    site.round("ab")
    first = {device: names(chosen(site, device)) for device in "ab"}
    file.save(tmp_path / "state", site.state)
    site.state, site.devices = file.load(tmp_path / "state"), {}
    site.round("ab")
    assert {device: names(chosen(site, device)) for device in "ab"} == first


def test_a_choice_that_the_server_never_heard_of_stays_too():
    """The first update was lost: the device is given the whole again, and sends its old choice of it."""
    site = Site(hermes(), {"a": 0.5})
    site.tell("a")
    site.train("a")
    first = names(chosen(site, "a"))
    site.fold({})
    with torch.no_grad():
        for leaf in site.state.tree.values():
            if leaf.is_floating_point():
                leaf.copy_(leaf.flip(0))  # now others would matter
    site.round("a")
    assert names(chosen(site, "a")) == first
    site.round("a")
    assert names(unpack(site.down["a"], site.layout.hidden)) == first


def test_another_share_before_the_server_heard_is_another_choice():
    site = Site(hermes(), {"a": 0.5})
    site.tell("a")
    site.train("a")
    site.fold({})
    site.shares["a"] = 0.75
    site.round("a")
    assert {name: len(one) for name, one in chosen(site, "a").items()} == {"0": 3, "3": 2, "7": 3}


def test_a_share_given_later_changes_nothing():
    site = Site(hermes(), {"a": 0.5})
    site.round("a")
    first = names(chosen(site, "a"))
    for later in (1.0, 0.3):
        site.shares["a"] = later
        site.round("a")
        assert names(chosen(site, "a")) == first
        assert site.told["a"].values["keep"] == 0.5


def test_of_a_run_begun_before_the_share_follows_from_the_choice():
    """Then the server remembers no share, only which neurons: the least share of as many."""
    site = Site(hermes(), SHARES)
    site.round("abc")
    facts = {key: fact for key, fact in site.state.facts.items() if not key.startswith("kept/")}
    site.state = State(site.state.tree, facts)
    before = {device: names(chosen(site, device)) for device in "abc"}
    assert site.algorithm.resources.fixed_values(site.state, "d") == {}
    site.round("abcd")
    for device in "abc":
        kept, hidden = site.told[device].values["keep"], site.layout.hidden
        assert kept <= SHARES[device]
        assert {name: count_active(count, kept) for name, count in hidden.items()} == {
            name: len(one) for name, one in before[device].items()
        }


def test_means_are_over_those_who_hold_a_coordinate():
    """By brute force, with first participations, later ones, and whole models in one round."""
    site = Site(hermes(), SHARES)
    site.round("ac")
    before = {key: leaf.clone() for key, leaf in site.state.tree.items()}
    results = site.round("abcd")
    assert any(key.startswith(PREFIX) for key in results["b"].tree)
    assert not any(key.startswith(PREFIX) for key in results["a"].tree)
    require_mean(site, before, results, {device: chosen(site, device) for device in "abcd"})
    before = {key: leaf.clone() for key, leaf in site.state.tree.items()}
    results = site.round("ab")
    require_mean(site, before, results, {device: chosen(site, device) for device in "ab"})


def test_one_step_is_that_of_the_whole_network_with_all_others_zero():
    """Outputs and gradients of the smaller network, from the second participation on."""
    hyper = msgspec.structs.replace(HYPER, local_epochs=1, batch_size=64)
    site = Site(hermes(), {"a": 0.5}, hyper)
    site.round("a")
    site.tell("a")
    index, whole = site.layout.index(chosen(site, "a")), network()
    tree = spread(bare(site.down["a"]), index, whole.tree())
    leaves = {key: leaf.clone().requires_grad_(key.endswith((".weight", ".bias"))) for key, leaf in tree.items()}
    (inputs, labels), *_ = Own(site.data("a"), site.told["a"])
    one = site.told["a"]
    whole.layers[9].p = 0.0
    functional.cross_entropy(functional_call(whole.layers.train(), leaves, (inputs,)), labels).backward()
    expected = {key: (leaf - 0.1 * leaf.grad).detach() if leaf.requires_grad else leaf for key, leaf in leaves.items()}
    model = network(6)
    model.layers[9].p = 0.0
    result = site.algorithm.local(model, site.devices["a"], site.down["a"], Own(site.data("a"), one), one)[1]
    torch.testing.assert_close(result.tree, extract(expected, index), rtol=1e-4, atol=1e-5)


def test_a_device_uses_its_part_as_it_left_it():
    """The network's own layers take it; before a device has one, it uses what came."""
    site = Site(hermes(), {"a": 0.5})
    site.round("a")
    site.round("a")
    model, inputs = network().layers.eval(), site.data("a").inputs
    served = site.algorithm.personal.parameters(network(), site.devices["a"], site.down["a"], site.told["a"])
    index = site.layout.index(chosen(site, "a"))
    whole = spread(site.results["a"].tree, index, network().tree())
    assert torch.allclose(
        functional_call(model, served, (inputs,)), functional_call(model, whole, (inputs,)), atol=1e-5
    )
    assert same(
        site.algorithm.personal.parameters(network(), State(), site.down["a"], site.told["a"]), bare(site.down["a"])
    )


def test_to_try_what_it_has_a_device_needs_nothing_but_the_first_time():
    """Then the whole, the same leaves for all; one that lost its part says so."""
    site = Site(hermes(), SHARES)
    site.tell("ab")
    shown = [site.algorithm.personal.sent_for_evaluation(site.state, device, site.told[device]) for device in "ab"]
    assert all(leaf is shown[1][key] is site.state.tree[key] for key, leaf in bare(shown[0]).items())
    site.round("ab")
    site.tell("ab")
    assert site.algorithm.personal.sent_for_evaluation(site.state, "a", site.told["a"]) == {}
    assert (
        site.algorithm.personal.parameters(network(), site.devices["a"], {}, site.told["a"]).keys()
        == site.layout.leaves.keys()
    )
    with pytest.raises(TaskFailed):
        site.algorithm.personal.parameters(network(), State(), {}, site.told["a"])


@pytest.mark.parametrize("keep", [0.3, 0.5, 1.0])
def test_bytes_are_the_formula_and_fedspus_from_the_second_time_on(keep):
    """Sizes of layers are alike, so that the same number of weights has both ends in any choice."""
    carried = {}
    for build in (hermes, fedspu):
        site = Site(build(), {"a": keep})
        if build is fedspu:
            site.devices["a"] = State(network().tree())
        site.round("a")
        first = dense().encode(site.results["a"].tree, None)[0].num_bytes
        site.round("a")
        carried[build] = [dense().encode(tree, None)[0].num_bytes for tree in (site.down["a"], site.results["a"].tree)]
        if build is hermes:
            count = count_parameters(site.layout.index(chosen(site, "a")), network().tree())
            bitmaps = sum(-(-one // 8) for one in site.layout.hidden.values())
            assert first == bitmaps + 4 * count
            assert carried[build] == [bitmaps + 4 * count, 4 * count]
    assert carried[hermes] == carried[fedspu]


def test_what_is_no_choice_is_refused():
    """Another number of neurons, no bitmap, a bitmap of another length, the whole; nothing of it reaches a mean."""
    site = Site(hermes(), {"a": 0.5})
    site.tell("a")
    up = {key: leaf.clone() for key, leaf in site.train("a").tree.items()}
    told, down = site.told["a"], site.down["a"]
    fewer = up | {"active/0": torch.tensor([1], dtype=torch.uint8)}
    for bad in (fewer, bare(up), up | {"active/0": torch.zeros(2, dtype=torch.uint8)}, down, {}):
        with pytest.raises(WireError):
            site.algorithm.check_update(told, down, bad)
    site.fold({"a": replace(site.train("a"), tree=up)})
    site.tell("a")
    with pytest.raises(WireError):
        site.algorithm.check_update(site.told["a"], site.down["a"], up)


def test_with_whole_models_and_a_fixed_order_it_is_fedavg(play, fleet):
    """A share of one: values, not changes, are averaged, which differ in the last bits; momentum begins anew once."""
    got, expected = play(hermes(), fleet, 3).tree, play(fedavg(), fleet, 3).tree
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_devices_stop_and_leave_as_fedspus_do():
    site = Site(hermes(keep=0.5, early_stopping=True, share=1.0, min_alive=2), {"a": 0.5, "b": 0.5})
    site.round("ab")
    assert [result.metrics[STOPPED] for result in site.results.values()] == [0.0, 0.0]
    site.devices["a"] = replace(site.devices["a"], facts={"stopping_loss": 0.0})
    site.devices["b"] = replace(site.devices["b"], facts={"stopping_loss": 1e9})
    site.round("ab")
    assert site.algorithm.departure.departed(site.state) == {"a"}
    assert site.algorithm.departure.min_alive == 2


def test_what_is_timed_is_a_step_on_what_came():
    """On the whole network before a device has chosen, on its part ever after: however many steps there are."""
    site = Site(hermes(), {"a": 0.5})
    for sizes in (site.layout.hidden, {"0": 2, "3": 1, "7": 2}):
        site.tell("a")
        told, down = site.told["a"], site.down["a"]
        _, result = site.algorithm.resources.timed_step(network(6), State(), down, Own(site.data("a"), told), told)
        assert {name: len(result.tree[f"{name}.weight"]) for name in sizes} == sizes
        site.round("a")
