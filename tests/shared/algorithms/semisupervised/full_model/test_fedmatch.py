"""FedMatch: what each half's steps are, who helps whom, what travels and what may not, which settings could work."""

from __future__ import annotations

import copy
import math
from collections import Counter

import msgspec
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.semisupervised.full_model.fedmatch import choose_helpers, fedmatch, make_probe
from shared.algorithms.semisupervised.full_model.fedmatch_device import agreed_labels, disagreement
from shared.algorithms.semisupervised.full_model.fedmatch_weights import (
    FedmatchSettings,
    check_changes,
    pack_changes,
    unpack_changes,
)
from shared.algorithms.semisupervised.semisfl_server import draw_batch_positions
from shared.data.views.pair import make_views
from shared.errors import ConfigError, TaskFailed, WireError
from shared.protocol.messages import Hyper, derive_seed
from shared.tensors.training_step import descend
from shared.tensors.tree import State
from tests.naming import naming
from tests.shared.algorithms.sessions import LABELLED_HYPER as HYPER
from tests.shared.algorithms.sessions import LabelledFleet as Fleet
from tests.shared.algorithms.sessions import Own, payload_bytes

SMALL = {"supervised_steps": 3, "mirrors": False, "schedule": "constant", "threshold": 0.34}  # of three classes
RATE, DECAY = HYPER.learning_rate, HYPER.weight_decay


def make(names="ab", name="normed", count=8, **options):
    return Fleet(fedmatch(**SMALL | options), names, name, count)


def trained_names(fleet):
    return sorted(name for name, _ in fleet.whole.layers.named_parameters())


def unravelled(fleet, vector):
    """Return psi as a tree, cut in pieces one after the other."""
    found, at = {}, 0
    for name in trained_names(fleet):
        leaf = fleet.whole.layers.state_dict()[name]
        found[name] = vector[at : at + leaf.numel()].view(leaf.shape)
        at += leaf.numel()
    assert at == len(vector)
    return found


def sigma_of(tree):
    return {name.removeprefix("sigma/"): leaf for name, leaf in tree.items() if name.startswith("sigma/")}


def statistics_of(tree):
    return {name: leaf for name, leaf in tree.items() if "/" not in name}


def require_close(found, expected):
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        torch.testing.assert_close(found[name], leaf, rtol=1e-5, atol=1e-6, msg=name)


def plain_sgd(leaves):
    """Return torch's own SGD for the paper's objective, which is lambda_s = 10 times that of the steps here."""
    return torch.optim.SGD(leaves, RATE / 10, HYPER.momentum, weight_decay=10 * DECAY, nesterov=True)


def test_psi_begins_as_a_fifth_of_sigma_and_their_sum_is_tested():
    fleet = make()
    network = fleet.whole.tree()
    require_close(sigma_of(fleet.state.tree), {name: network[name] for name in trained_names(fleet)})
    require_close(
        unravelled(fleet, fleet.state.tree["psi/values"]), {name: 0.2 * network[name] for name in trained_names(fleet)}
    )
    tested = fleet.algorithm.evaluated(fleet.state)
    assert tested.keys() == network.keys()
    require_close(tested, {n: 1.2 * leaf if n in trained_names(fleet) else leaf for n, leaf in network.items()})


def test_the_servers_steps_move_sigma_alone_down_ten_times_the_cross_entropy_of_the_sum():
    fleet = make()
    layers = copy.deepcopy(fleet.whole.layers).train()
    sigma = {n: leaf.clone().requires_grad_() for n, leaf in sigma_of(fleet.state.tree).items()}
    psi = unravelled(fleet, fleet.state.tree["psi/values"])
    others = {n: leaf.clone() for n, leaf in statistics_of(fleet.state.tree).items()}
    sgd, seed = plain_sgd(sigma.values()), derive_seed(11, 1, "supervised")
    torch.manual_seed(1)
    for step, index in zip(range(3), draw_batch_positions(12, 4, seed), strict=False):
        (view,) = make_views(fleet.labelled.inputs[index], ("strong",), derive_seed(seed, step, "views"), mirrors=False)
        sgd.zero_grad()
        outputs = functional_call(layers, {n: sigma[n] + psi[n] for n in sigma} | others, (view,))
        (10 * functional.cross_entropy(outputs, fleet.labelled.labels[index])).backward()
        sgd.step()
    begun = fleet.begin()
    require_close(sigma_of(begun.tree), {n: leaf.detach() for n, leaf in sigma.items()})
    require_close(statistics_of(begun.tree), others)
    assert torch.equal(begun.tree["psi/values"], fleet.state.tree["psi/values"])


def predictions(fleet, tree, psi, inputs):
    """Return what sigma + psi says in evaluation mode, before softmax."""
    parts = unravelled(fleet, psi)
    theta = {n: leaf + parts[n] for n, leaf in sigma_of(tree).items()}
    statistics = {n: leaf.clone() for n, leaf in statistics_of(tree).items()}
    return functional_call(fleet.whole.layers.eval(), theta | statistics, (inputs,)), theta


@pytest.mark.parametrize("helped", [False, True])
def test_a_devices_step_is_the_papers_by_plain_autograd(helped):
    """The objective term by term, over the examples that are sure; with helpers and without."""
    weights = {"consistency_weight": 0.7, "agreement_weight": 0.9, "sparsity_weight": 0.02, "closeness_weight": 0.5}
    fleet = make("abc", count=4, helper_period=2, threshold=0.35, **weights)
    fleet.hyper = msgspec.structs.replace(HYPER, local_epochs=1)
    if helped:
        fleet.play()
    begun, told = fleet.begin(), fleet.told["a"]
    inputs, _ = next(iter(Own(fleet.data["a"], told)))
    (strong,) = make_views(inputs, ("strong",), derive_seed(told.seed, 1, "views"), mirrors=False)
    result = fleet.train(begun, "a")
    names = [begun.facts[f"helper/{place}/a"] for place in (0, 1)] if helped else []
    assert set(names) == ({"b", "c"} if helped else set())

    psi = begun.tree["psi/values"].clone().requires_grad_()
    outputs, theta = predictions(fleet, begun.tree, psi, inputs)
    likelihoods = outputs.softmax(1)
    sure = [j for j in range(4) if likelihoods[j].max() >= 0.35]
    assert sure
    statistics = {n: leaf.clone() for n, leaf in statistics_of(begun.tree).items()}
    with torch.random.fork_rng():
        torch.manual_seed(told.seed)
        hard = functional_call(fleet.whole.layers.train(), theta | statistics, (strong,))
    others = [predictions(fleet, begun.tree, begun.tree[f"last/{n}"], inputs)[0].softmax(1).detach() for n in names]
    consistency = sum(p[j] @ (p[j] / likelihoods[j]).log() for p in others for j in sure) / (2 * len(sure))
    agreement = 0.0
    for j in sure:
        votes = Counter(int(p[j].argmax()) for p in (likelihoods, *others))
        label = min(votes, key=lambda one: (-votes[one], one))
        agreement = agreement - hard[j].log_softmax(0)[label] / len(sure)
    flat = torch.cat([leaf.flatten() for _, leaf in sorted(sigma_of(begun.tree).items())])
    loss = 0.7 * consistency + 0.9 * agreement + 0.02 * psi.abs().sum() + 0.5 * ((flat - psi) ** 2).sum()
    sgd, before = plain_sgd([psi]), psi.detach().clone()
    loss.backward()
    sgd.step()
    assert result.loss == pytest.approx(loss.item() / 10, rel=1e-5)
    assert result.metrics["sure_labels"] == len(sure) / 4
    parts = {"consistency": 0.7 * consistency, "agreement": 0.9 * agreement, "sparsity": 0.02 * before.abs().sum()}
    parts["closeness"] = 0.5 * ((flat - before) ** 2).sum()
    told = {name: result.metrics[f"{name}_loss"] for name in parts}
    assert told == {
        name: pytest.approx(torch.as_tensor(part).item() / 10, rel=1e-4, abs=1e-8) for name, part in parts.items()
    }
    changes = unpack_changes(result.tree, "psi/", psi.detach())
    torch.testing.assert_close(begun.tree["psi/values"] + changes, psi.detach(), rtol=1e-4, atol=2e-5)
    moved = {n: leaf + result.tree[n] for n, leaf in statistics_of(begun.tree).items()}
    require_close(moved, statistics)


def test_where_nothing_is_sure_psi_moves_towards_sigma_and_nothing_else_does():
    fleet = make("a", threshold=0.999999)
    begun = fleet.begin()
    result = fleet.train(begun, "a")
    assert result.metrics["sure_labels"] == 0
    flat = torch.cat([leaf.flatten() for _, leaf in sorted(sigma_of(begun.tree).items())])
    psi = begun.tree["psi/values"]
    after = psi + unpack_changes(result.tree, "psi/", psi)
    assert (flat - after).norm() < (flat - psi).norm()
    assert not any(leaf.any() for name, leaf in result.tree.items() if "/" not in name)


def test_the_label_is_the_class_of_most_votes_and_of_equals_the_lowest():
    likes = torch.eye(3)
    votes = [likes[[2, 0, 1]], likes[[2, 1, 0]], likes[[0, 1, 2]]]
    assert agreed_labels(votes).tolist() == [2, 1, 0]
    assert agreed_labels(votes[:1]).tolist() == [2, 0, 1]


def test_the_disagreement_is_the_mean_divergence_and_zero_with_oneself():
    generator = torch.Generator().manual_seed(4)
    own, first, second = (torch.randn(5, 3, generator=generator) for _ in range(3))
    p, each = own.softmax(1), [one.softmax(1) for one in (first, second)]
    expected = sum((q * (q / p).log()).sum() for q in each) / (5 * 2)
    torch.testing.assert_close(disagreement(own, [first, second]), expected)
    assert disagreement(own, [own, own]).item() == pytest.approx(0.0, abs=1e-6)
    certain = torch.tensor([[200.0, -200.0, -200.0]])  # a share of zero is no NaN
    assert disagreement(torch.zeros(1, 3), [certain]).item() == pytest.approx(math.log(3), rel=1e-6)


def test_the_mean_of_the_changes_moves_psi_and_each_devices_own_is_kept():
    """Every device counts as much, however many examples it has; entries that did not travel did not change."""
    fleet = make("abc", least_change=2e-3)
    fleet.data["b"] = fleet.data["b"].subset(torch.arange(4))
    begun = fleet.play()
    psi = begun.tree["psi/values"]
    changes = {device: unpack_changes(fleet.results[device].tree, "psi/", psi) for device in "abc"}
    assert all(0 < (one == 0).sum() < len(psi) for one in changes.values())
    mean = torch.stack([*changes.values()]).double().mean(0)
    torch.testing.assert_close(fleet.state.tree["psi/values"].double(), psi.double() + mean, rtol=1e-5, atol=1e-6)
    for device in "abc":
        torch.testing.assert_close(fleet.state.tree[f"last/{device}"], psi + changes[device])
    assert all(torch.equal(fleet.state.tree[name], leaf) for name, leaf in begun.tree.items() if "sigma" in name)
    for name, leaf in statistics_of(begun.tree).items():
        moved = torch.stack([fleet.results[device].tree[name].double() for device in "abc"]).mean(0)
        expected = leaf + moved if leaf.is_floating_point() else leaf + moved.round().to(leaf.dtype)
        torch.testing.assert_close(fleet.state.tree[name], expected.to(leaf.dtype), rtol=1e-5, atol=1e-6)
    assert all(state == State() for state in fleet.devices.values()), "devices keep nothing"


def test_without_helpers_the_server_keeps_no_devices_psi():
    fleet = make("ab", helpers=0, helper_period=1)
    fleet.play(2)
    assert not any(name.startswith("last/") for name in fleet.state.tree)
    assert not any("helper" in name for name in (*fleet.state.facts, *fleet.sent["a"]))


def sparse_bytes(some: int, count: int) -> int:
    """Return the bytes of so many of all entries, with a bit for each of all or four bytes for each of some."""
    return 4 * some + (min(4 * some, -(-count // 8)) if some < count else 0)


def test_helpers_come_every_so_many_rounds_and_their_bytes_are_of_what_differs():
    """To the byte: sigma and psi whole, of a helper the entries that differ, and which; up only what has changed."""
    fleet = make("abc", name="cnn", helper_period=3, least_change=5e-3)
    size, shares = payload_bytes(fleet.whole.tree()), set()
    count = size // 4
    for number in range(1, 7):
        before = dict(fleet.state.tree)
        fleet.play()
        extra = 0
        if number % 3 == 0:
            for place in (0, 1):
                psi = before[f"last/{fleet.state.facts[f'helper/{place}/a']}"]
                differs = int(((psi - before["psi/values"]).abs() > 5e-3).sum())
                extra += sparse_bytes(max(1, differs), count)
        else:
            assert not any(name.startswith("helper/") for name in fleet.state.facts)
        assert payload_bytes(fleet.sent["a"]) == 2 * size + extra
        changed = round(fleet.results["a"].metrics["changed_entries"] * count)
        assert payload_bytes(fleet.results["a"].tree) == sparse_bytes(changed, count)
        shares.add(changed < count)
    assert True in shares, "some entries did not travel"


def test_the_nearest_by_prediction_help():
    """Of five, whose last bias is all that tells them apart; equals by name; nobody helps himself."""
    fleet = make("abcde", name="cnn")
    tree, psi = dict(fleet.state.tree), fleet.state.tree["psi/values"]
    settings = FedmatchSettings()
    for device, tilt in zip("abcde", (0.0, 3.0, 0.1, 0.1, 3.2), strict=True):
        bias = torch.zeros_like(psi)
        at = torch.cat([torch.full((leaf.numel(),), n) for n, leaf in enumerate(unravelled(fleet, psi).values())])
        place = trained_names(fleet).index(max(n for n in trained_names(fleet) if n.endswith("bias")))
        bias[(at == place).nonzero()[0]] = tilt
        tree[f"last/{device}"] = psi + bias
    probe = make_probe(fleet.labelled.inputs, 5)
    found = choose_helpers(settings, fleet.skeleton, State(tree), probe, tuple("abcx"))
    assert found == {
        "helper/0/a": "c",
        "helper/1/a": "d",
        "helper/0/b": "e",
        "helper/1/b": "c",
        "helper/0/c": "d",
        "helper/1/c": "a",
    }


@pytest.mark.parametrize("shape", [(4, 3, 32, 32), (40, 9, 128)])
def test_the_probe_is_one_example_of_noise_and_always_the_same(shape):
    inputs = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 2
    probe = make_probe(inputs, 7)
    assert probe.shape == (1, *shape[1:])
    assert torch.equal(probe, make_probe(inputs, 7))
    if len(shape) == 4:
        assert 0 <= probe.min() < 0.02
        assert 0.98 < probe.max() <= 1
        assert probe.mean().item() == pytest.approx(0.495, abs=0.03), "cut off about evenly on both sides"
    else:
        assert probe.mean().item() == pytest.approx(1.0, abs=0.1)


def test_what_is_tested_has_no_psi_that_is_next_to_nothing():
    fleet = make("a", name="cnn", least_value=0.01)
    psi = fleet.state.tree["psi/values"]
    assert 0 < int((psi.abs() <= 0.01).sum()) < len(psi)
    kept = unravelled(fleet, torch.tensor([float(one) if abs(one) > 0.01 else 0.0 for one in psi]))
    sigma = sigma_of(fleet.state.tree)
    require_close(fleet.algorithm.evaluated(fleet.state), {n: sigma[n] + kept[n] for n in sigma})


@pytest.mark.parametrize("some", [[], [0], [0, 1, 2, 7, 30], range(100), range(99)])
def test_changes_come_back_as_they_were_and_nothing_is_not_nobody(some):
    changes = torch.full((100,), 1e-5)
    changes[list(some)] = torch.arange(len(some)) + 0.5
    packed = pack_changes(changes, 2e-5, "p/")
    assert set(packed) <= {"p/values", "p/mask", "p/index"}
    assert packed["p/values"].numel() == max(1, len(some))
    found = unpack_changes(packed, "p/", changes)
    expected = torch.where(changes > 2e-5, changes, 0.0)
    expected[0] = changes[0]
    assert torch.equal(found, expected if 0 in some or not len(some) else torch.where(changes > 2e-5, changes, 0.0))
    check_changes({name: leaf.to("meta") for name, leaf in packed.items()}, "p/", changes)


VALUES = torch.ones(3)
MASK, INDEX = torch.tensor([0b111, 0], dtype=torch.uint8), torch.tensor([1, 4, 9], dtype=torch.int32)


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        ({}, "unknown-tensor"),
        ({"values": VALUES, "mask": MASK, "index": INDEX}, "unknown-tensor"),
        ({"values": VALUES, "other": MASK}, "unknown-tensor"),
        ({"values": VALUES}, "shape"),
        ({"values": torch.ones(11)}, "shape"),
        ({"values": torch.ones(0), "mask": MASK * 0}, "shape"),
        ({"values": VALUES.double(), "mask": MASK}, "dtype"),
        ({"values": VALUES.view(3, 1), "mask": MASK}, "shape"),
        ({"values": VALUES * math.nan, "mask": MASK}, "not-finite"),
        ({"values": VALUES, "mask": MASK[:1]}, "shape"),
        ({"values": VALUES, "mask": MASK | MASK << 1}, "shape"),
        ({"values": VALUES, "index": INDEX[:2]}, "shape"),
        ({"values": VALUES, "index": INDEX.flip(0)}, "index"),
        ({"values": VALUES, "index": INDEX + 1}, "index"),
    ],
)
def test_what_are_no_changes_of_ten_entries_is_refused(packed, reason):
    with pytest.raises(WireError) as caught:
        check_changes(packed, "", torch.zeros(10))
    assert caught.value.reason == reason


def test_an_update_must_have_changes_and_all_statistics_and_nothing_else():
    fleet = make("a")
    begun = fleet.begin()
    up, told = fleet.train(begun, "a").tree, fleet.told["a"]
    check, sent = fleet.algorithm.check_update, fleet.sent["a"]
    for spoilt in ("psi/values", "1.running_mean"):
        with pytest.raises(WireError):
            check(told, sent, {name: leaf for name, leaf in up.items() if name != spoilt})
    for name in ("sigma/0.weight", "helper/0/values", "last/a"):
        with pytest.raises(WireError) as caught:
            check(told, sent, up | {name: torch.ones(3)})
        assert caught.value.reason == "unknown-tensor"


def test_a_device_refuses_what_are_not_the_parts_of_its_network():
    fleet = make("ab", helper_period=2)
    fleet.play()
    begun = fleet.begin()
    told, algorithm = fleet.told["a"], fleet.algorithm
    down = algorithm.broadcast(begun, "a", told)
    assert "helper/0/values" in down
    for name in ("sigma/0.weight", "psi/values", "1.running_mean", "helper/0/values"):
        spoilt = {n: leaf for n, leaf in down.items() if n != name} | {"helper/0/odd": VALUES}
        odd = "helper" in name
        with pytest.raises(WireError, match="odd" if odd else naming(repr(name))) as caught:
            algorithm.local(fleet.whole, State(), spoilt, Own(fleet.data["a"], told), told)
        assert caught.value.reason == ("unknown-tensor" if odd else "shape")
    nobody = Own(fleet.data["a"].subset(torch.arange(0)), told)
    with pytest.raises(TaskFailed, match="examples"):
        algorithm.local(fleet.whole, State(), dict(down), nobody, told)


def test_labels_that_a_device_has_are_not_looked_at_and_states_are_not_changed():
    fleet, blind = make("ab", helper_period=2), make("ab", helper_period=2)
    fleet.data["a"].labels.fill_(2)
    assert not fleet.algorithm.reads_labels
    fleet.play(2)
    blind.play(2)
    assert fleet.state.facts == blind.state.facts
    assert all(torch.equal(leaf, blind.state.tree[name]) for name, leaf in fleet.state.tree.items())
    before = {name: leaf.clone() for name, leaf in fleet.state.tree.items()}
    fleet.play()
    assert fleet.state.tree.keys() == before.keys()
    again = blind.begin()
    assert all(torch.equal(leaf, blind.state.tree[name]) for name, leaf in before.items())
    assert again.facts["server_rounds"] == 3


def test_the_first_rounds_supervised_steps_are_more_and_a_class_without_labels_is_named():
    plain, warm = make("a", name="cnn"), make("a", name="cnn", warmup_steps=4)
    assert not torch.equal(plain.begin().tree["sigma/0.weight"], warm.begin().tree["sigma/0.weight"])
    fleet = make("a")
    fleet.labelled = fleet.labelled.subset((fleet.labelled.labels != 1).nonzero().flatten())
    with pytest.raises(ConfigError, match=naming("server_data", "class 1")):
        fleet.begin()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"threshold": 1.0}, "threshold"),
        ({"supervised_steps": 0}, "supervised_steps"),
        ({"helpers": -1}, "helpers"),
        ({"helper_period": 0}, "helper_period"),
        ({"supervised_weight": 0.0}, "supervised_weight"),
        ({"agreement_weight": -1.0}, "agreement_weight"),
        ({"closeness_weight": math.inf}, "closeness_weight"),
        ({"sparsity_weight": math.nan}, "sparsity_weight"),
        ({"psi_share": -0.1}, "psi_share"),
        ({"least_value": -1e-9}, "least_value"),
        ({"least_change": math.nan}, "least_change"),
        ({"server_views": "none"}, "server_views"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        fedmatch(**options)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_step_size_that_is_refused_is_the_first_by_which_psi_diverges(nesterov, momentum):
    """Found by taking the steps: the distance to sigma shrinks just below the bound, and grows just above it."""
    settings = FedmatchSettings(nesterov=nesterov, closeness_weight=30.0)
    curvature = 2 * 30.0 / 10
    bound = 2 * (1 + momentum) / (1 + 2 * momentum if nesterov else 1) / curvature
    for share in (0.98, 1.02):
        hyper = Hyper(learning_rate=share * bound, momentum=momentum)
        psi, momenta = torch.ones(1, dtype=torch.float64), {}
        for _ in range(4000):
            psi.grad = curvature * psi
            descend([("psi", psi)], momenta, hyper, nesterov=nesterov)
        if share < 1:
            assert abs(psi.item()) < 1e-3
            settings.check_hyper(hyper)
        else:
            assert not abs(psi.item()) < 1e3
            with pytest.raises(ConfigError, match=naming("hyper.learning_rate", f"{bound:.3g}", "closeness_weight")):
                settings.check_hyper(hyper)
