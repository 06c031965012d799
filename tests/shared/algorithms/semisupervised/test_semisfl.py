"""SemiSFL as a whole: split step equals uncut step; traffic and refusals."""

from __future__ import annotations

import math
from functools import partial

import msgspec
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.base import Cohort
from shared.algorithms.semisupervised.learner import Learner, project
from shared.algorithms.semisupervised.losses import References, contrast
from shared.algorithms.semisupervised.semisfl import semisfl
from shared.algorithms.semisupervised.semisfl_server import MOMENTUM
from shared.codecs.dense import dense
from shared.data.examples import Examples
from shared.data.views.pair import make_views
from shared.errors import ConfigError, TaskFailed, WireError
from shared.protocol.messages import Hyper, derive_seed
from shared.tensors.generators import seed_torch
from shared.tensors.tree import Mean, State
from tests.naming import naming
from tests.shared.algorithms.sessions import Own, drive, make

HYPER = Hyper(batch_size=4, learning_rate=0.1, weight_decay=0.01)
SMALL = {
    "cut": 1,
    "steps": 2,
    "supervised_steps": 3,
    "hidden": 7,
    "projections": 5,
    "labelled_queue": 8,
    "unlabelled_queue": 32,
    "threshold": 0.34,  # of three classes: some examples are sure
    "mirrors": False,
    "schedule": "constant",
}


def pictures(shape, count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    return Examples((torch.rand(count, *shape, generator=generator) + labels.view(-1, 1, 1, 1) / 3) / 2, labels)


class Fleet:
    """A server with labels and devices without, round by round."""

    def __init__(self, names="a", name="normed", count=8, hyper=HYPER, **options):
        self.algorithm, self.names = semisfl(**SMALL | options), tuple(names)
        self.whole, self.skeleton = make(name)
        self.state = self.algorithm.init(self.whole, 5)
        self.labelled = pictures(self.whole.example, 12, 99)
        self.data = {
            device: pictures(self.whole.example, count, seed).without_labels() for seed, device in enumerate(self.names)
        }
        self.cohort, self.number = Cohort(self.names, hyper, seed=11, rounds=10), 0

    @property
    def settings(self):
        return self.algorithm.local.args[0]

    def begin(self) -> State:
        """Take the supervised steps of the next round."""
        self.number += 1
        batch = self.labelled.inputs, self.labelled.labels
        with seed_torch(self.number):
            return self.algorithm.server.train(self.skeleton, self.state, batch, self.cohort, self.number)

    def play(self, **how):
        """Play a round; return what its sessions came to, with the state before the average."""
        begun = self.begin()
        told = self.algorithm.assign(begun, self.cohort, {}, self.number)
        batches = {device: Own(self.data[device], one) for device, one in told.items()}
        with seed_torch(self.number):
            driven = drive(self.algorithm, self.skeleton, begun, told, batches, **how)
        mean = Mean()
        for device in self.names:
            came = driven.results[device]
            self.algorithm.check_update(told[device], self.algorithm.broadcast(begun, device, told[device]), came.tree)
            mean = self.algorithm.absorb(mean, device, told[device], came)
        self.state = self.algorithm.aggregate(driven.state, mean)
        return driven


def require_close(found, expected):
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        torch.testing.assert_close(found[name], leaf, rtol=1e-5, atol=1e-6, msg=name)


def monolithic(fleet, begun, told):
    """One step of all devices' batches together, through the uncut network and torch's own SGD; parameters after it.

    All devices have the same student's bottom at the first step, so that their mean after it is one step along the
    mean of their gradients.
    """
    settings, skeleton = fleet.settings, fleet.skeleton
    views = []
    for device, one in told.items():
        inputs, _ = next(iter(Own(fleet.data[device], one)))
        views.append(make_views(inputs, ("weak", "strong"), derive_seed(one.seed, 1, "views"), mirrors=False))
    weak, strong = (torch.cat([pair[place] for pair in views]) for place in (0, 1))
    learner = Learner.from_tree(settings, skeleton, {k: v.clone() for k, v in begun.tree.items()}, 0)
    skeleton.layers.eval()
    logits = functional_call(skeleton.layers, learner.teacher, (weak,)).detach()
    seen = functional_call(skeleton.below(1), bottom(skeleton, learner.teacher), (weak,)).detach()
    sure, labels = logits.softmax(1).max(1)
    assert 0 < int((sure > 0.34).sum()) <= len(sure)
    queued = learner.queue.with_current(References(project(learner.teacher_head, seen), labels, sure > 0.34))
    skeleton.layers.train()
    leaves = {**learner.weights, **learner.buffers}
    features = functional_call(skeleton.below(1), bottom(skeleton, leaves), (strong,))
    top = {name: leaves[name] for name in skeleton.above(1).state_dict()}
    outputs = functional_call(skeleton.above(1), top, (features,))
    each = functional.cross_entropy(outputs, labels, reduction="none") * (sure > 0.34)
    loss = (each + contrast(project(learner.head, features), labels, queued, settings.temperature)).mean()
    loss.backward()
    both = learner.weights | {f"head/{name}": leaf for name, leaf in learner.head.items()}
    hyper = fleet.cohort.hyper
    torch.optim.SGD(both.values(), hyper.learning_rate, hyper.momentum, weight_decay=hyper.weight_decay).step()
    return {name: leaf.detach() for name, leaf in both.items()}


def bottom(model, leaves):
    return {name: leaves[name] for name in model.below(1).state_dict()}


@pytest.mark.parametrize("names", ["a", "abcd"])
def test_a_split_step_is_a_step_of_the_uncut_network_on_all_batches_together(names):
    """Property 3, without BatchNorm below the cut, whose statistics are each device's own."""
    fleet = Fleet(names, "cnn", steps=1)
    before = fleet.begin()
    told = fleet.algorithm.assign(before, fleet.cohort, {}, 1)
    expected = monolithic(fleet, before, told)
    fleet.number = 0
    fleet.play()
    require_close({name: fleet.state.tree[name] for name in expected}, expected)


def test_unequal_batches_count_as_much_for_each_device():
    """The mean over devices of their own means, equation (7); a device's features get the gradient of its own mean."""
    fleet = Fleet("ab", "cnn")
    begun = fleet.begin()
    learner = Learner.from_tree(fleet.settings, fleet.skeleton, begun.tree, 0)
    generator = torch.Generator().manual_seed(3)
    shape = fleet.skeleton.below(1)(torch.zeros(1, device="meta").expand(1, *fleet.whole.example)).shape[1:]
    sent = {d: tuple(torch.rand(n, *shape, generator=generator) for _ in range(2)) for d, n in (("a", 4), ("b", 2))}
    both = learner.session_pass(sent)
    sole = {device: learner.session_pass({device: one}) for device, one in sent.items()}
    assert both.loss > 0
    top = {name for name in both.gradients if not name.startswith("head/")}  # the head compares with both's references
    for name in top:
        alone = (sole["a"].gradients[name] + sole["b"].gradients[name]) / 2
        torch.testing.assert_close(both.gradients[name], alone, rtol=1e-4, atol=1e-6)
    assert [len(both.down[device]) for device in "ab"] == [4, 2]


def test_top_and_head_have_a_loss_each_and_the_teacher_none():
    """Property 2: with no sure pseudo-label the top stands still; the labelled queue alone still moves the head."""
    fleet = Fleet("a", "cnn", threshold=0.999)
    begun = fleet.begin()
    learner = Learner.from_tree(fleet.settings, fleet.skeleton, begun.tree, 0)
    shape = fleet.skeleton.below(1)(torch.zeros(1, device="meta").expand(1, *fleet.whole.example)).shape[1:]
    features = torch.rand(2, 4, *shape, generator=torch.Generator().manual_seed(4))
    found = learner.session_pass({"a": (features[0], features[1])})
    assert not found.current.confident.any()
    assert not any(leaf.any() for name, leaf in found.gradients.items() if not name.startswith("head/"))
    assert any(leaf.any() for name, leaf in found.gradients.items() if name.startswith("head/"))
    assert found.down["a"].any(), "features get what the head gets"
    assert not any(leaf.requires_grad for leaf in (*learner.teacher.values(), *found.current.projections))


def test_what_travels_is_the_papers_to_the_byte_and_no_label_or_output_is_in_it():
    """(c): 8 b D up and 4 b D down a step, two bottoms down and one up a round. Devices' labels were never read."""
    fleet = Fleet("ab", "normed")
    driven = fleet.play()
    below = fleet.whole.below(1).state_dict()
    size = sum(leaf.numel() * leaf.element_size() for leaf in below.values())
    features = 4 * 4 * math.prod((4, 6, 6))

    def payload(tree):
        return dense().encode(tree, None)[0].num_bytes

    told = fleet.algorithm.assign(fleet.state, fleet.cohort, {}, 1)["a"]
    down = fleet.algorithm.broadcast(fleet.state, "a", told)
    assert payload(down) == 2 * size
    assert set(down) == {*below, *(f"teacher/{name}" for name in below)}
    assert {payload(driven.results[device].tree) for device in "ab"} == {size}
    for ups, downs in zip(driven.ups, driven.downs, strict=True):
        assert {payload(up) for up in ups.values()} == {2 * features}
        assert {payload(one) for one in downs.values()} == {features}
        assert {name for up in ups.values() for name in up} == {"features", "teacher"}
        assert {name for one in downs.values() for name in one} == {"gradient"}


def test_the_average_is_over_the_devices_that_took_part_and_they_keep_nothing():
    """Property 8; BatchNorm's counter stays a whole number."""
    fleet = Fleet("abc")
    driven = fleet.play()
    for name in fleet.whole.below(1).state_dict():
        values = torch.stack([driven.results[device].tree[name].double() for device in "abc"])
        torch.testing.assert_close(fleet.state.tree[name].double(), values.mean(0), rtol=1e-6, atol=1e-7)
    assert fleet.state.tree["1.num_batches_tracked"].dtype == torch.int64
    assert all(state == State() for state in driven.devices.values())
    assert not any(name.startswith(MOMENTUM) for name in fleet.state.tree)


def test_a_teacher_moves_on_devices_only_where_it_is_told_to():
    """It never travels back; the next features of a device that moves its own differ."""
    usual, own = Fleet("a"), Fleet("a", teacher_update="device")
    first, second = usual.play(), own.play()
    assert torch.equal(first.ups[0]["a"]["teacher"], second.ups[0]["a"]["teacher"])
    assert not torch.equal(first.ups[1]["a"]["teacher"], second.ups[1]["a"]["teacher"])
    assert second.results["a"].tree.keys() == first.results["a"].tree.keys()


def test_the_others_go_on_without_a_device_that_misses_steps():
    fleet = Fleet("ab", steps=4, count=16)
    driven = fleet.play(misses=lambda step, device: device == "b" and step >= 2)
    assert [sorted(ups) for ups in driven.ups] == [["a", "b"], ["a"], ["a"], ["a"]]
    assert [driven.results[device].metrics["missed_steps"] for device in "ab"] == [0.0, 3.0]
    assert driven.state.facts["session_steps"] == 4


def test_a_device_whose_numbers_overflow_moves_nobody():
    """Its features are numbers, what comes of them is not: it is answered with nothing, the others as without it."""

    def spoil(step, device, up):
        if device == "b" and step == 1:
            up["features"] = torch.full_like(up["features"], 3e38)

    fleet, clean = Fleet("ab", "cnn", steps=1), Fleet("ab", "cnn", steps=1)
    for one in (fleet, clean):
        one.state.tree["3.weight"].abs_().mul_(10)  # so that the sum of large features is none
    driven = fleet.play(spoil=spoil)
    assert driven.downs[0]["b"] == {}
    assert driven.results["b"].metrics["refused_batches"] == 1
    expected = clean.play(misses=lambda _step, device: device == "b")
    assert torch.equal(driven.downs[0]["a"]["gradient"], expected.downs[0]["a"]["gradient"])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda up: up.pop("teacher"), "unknown-tensor"),
        (lambda up: up.update(labels=torch.zeros(4)), "unknown-tensor"),
        (lambda up: up.update(features=up["features"].double()), "dtype"),
        (lambda up: up.update(teacher=up["teacher"][:2]), "shape"),
        (lambda up: up.update({name: leaf.repeat(2, 1, 1, 1) for name, leaf in up.items()}), "shape"),
        (lambda up: up.update({name: leaf[:, :2] for name, leaf in up.items()}), "shape"),
        (lambda up: up["teacher"].view(-1)[3:4].fill_(math.nan), "not-finite"),
    ],
)
def test_features_that_no_server_part_could_take_are_refused(spoil, reason):
    fleet = Fleet("a")
    with pytest.raises(WireError) as caught:
        fleet.play(spoil=lambda _step, _device, up: spoil(up))
    assert caught.value.reason == reason


def test_a_device_refuses_what_is_not_both_bottoms():
    fleet = Fleet("a")
    told = fleet.algorithm.assign(fleet.state, fleet.cohort, {}, 1)["a"]
    down = fleet.algorithm.broadcast(fleet.state, "a", told)
    half = {name: leaf for name, leaf in down.items() if not name.startswith("teacher/")}
    with pytest.raises(WireError, match=naming(len(half))) as caught:
        next(fleet.algorithm.local(fleet.skeleton, State(), half, Own(fleet.data["a"], told), told))
    assert caught.value.reason == "shape"
    nobody = Own(fleet.data["a"].subset(torch.arange(0)), told)
    with pytest.raises(TaskFailed, match="examples"):
        next(fleet.algorithm.local(fleet.skeleton, State(), down, nobody, told))


def test_labels_at_the_server_are_of_every_class_and_of_no_other():
    fleet = Fleet("a")
    fleet.labelled = fleet.labelled.subset((fleet.labelled.labels != 1).nonzero().flatten())
    with pytest.raises(ConfigError, match=naming("server_data", "class 1")):
        fleet.begin()
    fleet.labelled = Examples(fleet.labelled.inputs, torch.full_like(fleet.labelled.labels, 3))
    with pytest.raises(ConfigError, match=naming("server_data", 3)):
        fleet.begin()


def test_the_servers_training_changes_no_state_but_its_own():
    """A missed round leaves nothing of it; the same seed does the same again."""
    fleet = Fleet("a")
    before = {name: leaf.clone() for name, leaf in fleet.state.tree.items()}
    first = fleet.begin()
    assert all(torch.equal(leaf, fleet.state.tree[name]) for name, leaf in before.items())
    fleet.number = 0
    again = fleet.begin()
    assert again.facts == first.facts
    assert all(torch.equal(leaf, again.tree[name]) for name, leaf in first.tree.items())
    assert first.facts["followed"] == 3
    assert int(first.tree["queue/labelled/written"]) == 3 * 4


def test_the_first_sessions_supervised_steps_are_more():
    fleet = Fleet("a", warmup_steps=4)
    followed = []
    for _ in range(2):
        fleet.play()
        followed.append(fleet.state.facts["followed"])
    assert followed == [3 + 4, 2 * 3 + 4]


def test_supervised_steps_fall_with_the_rounds_that_were_observed():
    """K_s of the state follows the rule; beta 0 and one round a period let it fall as fast as it can."""
    fleet = Fleet("a", period=1, window=1, beta=0.0, per_step=False)
    falls = []
    for _ in range(3):
        fleet.play()
        falls.append(fleet.state.facts["history/steps"])
    faster = fleet.state.facts["history/faster"]
    assert falls[0] == 3, "nothing is known after one round"
    assert falls[2] == (falls[1] // 1.5 if faster == "1" else falls[1])
    fixed = Fleet("a", period=1, window=1, beta=0.0, adapt=False)
    for _ in range(3):
        fixed.play()
    assert fixed.state.facts["history/steps"] == 3


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"threshold": 1.0}, "threshold"),
        ({"threshold": 0.0}, "threshold"),
        ({"temperature": 0.0}, "temperature"),
        ({"inertia": 1.0}, "inertia"),
        ({"head": "big"}, "head"),
        ({"steps": 0}, "steps"),
        ({"labelled_queue": -1}, "queues"),
        ({"alpha": 1.0}, "alpha"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        semisfl(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"labelled_queue": 3}, ["labelled_queue", 3, 4]),
        ({"labelled_queue": 5, "server_batch": 6}, ["labelled_queue", 5, 6]),
        ({"unlabelled_queue": 3}, ["unlabelled_queue", 3, 4]),
        ({"labelled_queue": 2, "server_batch": 2}, []),
        ({"labelled_queue": 0, "unlabelled_queue": 0}, []),
        ({"labelled_queue": 1, "unlabelled_queue": 1, "contrastive": False, "clustering": False}, []),
        ({"labelled_queue": 12, "server_batch": 99}, []),
    ],
)
def test_a_queue_smaller_than_a_batch_is_refused(options, named):
    """Each by the batches that go there: a server of few examples takes no more of them at a step, whatever it says."""
    fleet = Fleet("a", **options)
    labelled = fleet.labelled.subset(torch.arange(12))
    check = partial(fleet.algorithm.server.check, fleet.skeleton, (labelled.inputs, labelled.labels), HYPER)
    if not named:
        check()
        return
    with pytest.raises(ConfigError, match=naming(*named)):
        check()


@pytest.mark.parametrize(("head", "layers"), [("none", 0), ("linear", 1), ("mlp", 2)])
def test_heads_of_all_kinds_project_to_length_one(head, layers):
    fleet = Fleet("a", head=head)
    assert len([name for name in fleet.state.tree if name.startswith("head/")]) == 2 * layers
    fleet.play()
    rows = fleet.state.tree["queue/labelled/projections"]
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))


def test_the_step_size_ends_at_its_least():
    algorithm = semisfl(**SMALL | {"schedule": "cosine", "least_rate": 0.01})
    state = Fleet("a").state
    cohort = Cohort(("a",), msgspec.structs.replace(HYPER, learning_rate=0.03), seed=1, rounds=100)
    rates = [algorithm.assign(state, cohort, {}, number)["a"].hyper.learning_rate for number in (1, 51, 100)]
    assert rates == pytest.approx([0.03, 0.02, 0.01], abs=1e-5)
