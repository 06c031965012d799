"""FedSwitch: what the server's steps are, who labels and what therefore travels, what a device may send."""

from __future__ import annotations

import copy
import math

import msgspec
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.semisupervised.full_model.fedswitch import fedswitch
from shared.algorithms.semisupervised.full_model.fedswitch_device import DIVERGENCE
from shared.algorithms.semisupervised.semisfl_server import draw_batch_positions
from shared.data.views.pair import make_views
from shared.errors import ConfigError, TaskFailed, WireError
from shared.protocol.messages import Assignment, derive_seed
from shared.tensors.tree import State
from tests.naming import naming
from tests.shared.algorithms.sessions import LABELLED_HYPER as HYPER
from tests.shared.algorithms.sessions import LabelledFleet as Fleet
from tests.shared.algorithms.sessions import Own, payload_bytes

SMALL = {"supervised_steps": 3, "mirrors": False, "schedule": "constant", "threshold": 0.34}  # of three classes


def make(names="ab", name="normed", count=8, **options):
    return Fleet(fedswitch(**SMALL | options), names, name, count)


def student(tree):
    return {name: leaf for name, leaf in tree.items() if not name.startswith("teacher/")}


def teacher(tree):
    return {name.removeprefix("teacher/"): leaf for name, leaf in tree.items() if name.startswith("teacher/")}


def require_close(found, expected):
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        torch.testing.assert_close(found[name], leaf, rtol=1e-5, atol=1e-6, msg=name)


def test_the_servers_steps_are_torchs_own_sgd_and_the_teacher_the_running_mean():
    """On cross-entropy alone; of three steps the teacher is the mean of the students after them, statistics too."""
    fleet = make()
    layers, after = copy.deepcopy(fleet.whole.layers).train(), []
    rate, decay = HYPER.learning_rate, HYPER.weight_decay
    sgd = torch.optim.SGD(layers.parameters(), rate, HYPER.momentum, weight_decay=decay, nesterov=True)
    seed = derive_seed(11, 1, "supervised")
    torch.manual_seed(1)
    for step, index in zip(range(3), draw_batch_positions(12, 4, seed), strict=False):
        (view,) = make_views(fleet.labelled.inputs[index], ("strong",), derive_seed(seed, step, "views"), mirrors=False)
        sgd.zero_grad()
        functional.cross_entropy(layers(view), fleet.labelled.labels[index]).backward()
        sgd.step()
        after.append({name: leaf.clone() for name, leaf in layers.state_dict().items()})
    begun = fleet.begin()
    require_close(student(begun.tree), after[-1])
    mean = {n: sum(one[n] for one in after) / 3 if leaf.is_floating_point() else leaf for n, leaf in after[-1].items()}
    require_close(teacher(begun.tree), mean)
    assert begun.facts["followed"] == 3


@pytest.mark.parametrize("by_teacher", [True, False])
def test_a_devices_step_is_fixmatchs_by_plain_autograd(by_teacher):
    """Weak view labelled in evaluation mode by whoever labels, mean over the whole batch, torch's own SGD."""
    fleet = make("a", count=4, switch_divergence=100.0 if by_teacher else 0.0, threshold=0.37)
    fleet.hyper = msgspec.structs.replace(HYPER, local_epochs=1)
    begun = fleet.begin()
    told = fleet.told["a"]
    inputs, _ = next(iter(Own(fleet.data["a"], told)))
    weak, strong = make_views(inputs, ("weak", "strong"), derive_seed(told.seed, 1, "views"), mirrors=False)
    layers = copy.deepcopy(fleet.whole.layers)
    labeller = teacher(begun.tree) if by_teacher else student(begun.tree)
    shares = functional_call(layers.eval(), labeller, (weak,)).softmax(1).detach()
    sure, labels = shares.max(1)
    assert int((sure > 0.37).sum()) > 0
    layers.load_state_dict(student(begun.tree))
    with torch.random.fork_rng():
        torch.manual_seed(told.seed)
        each = functional.cross_entropy(layers.train()(strong), labels, reduction="none")
    loss = (each * (sure > 0.37)).sum() / 4
    loss.backward()
    rate, decay = HYPER.learning_rate, HYPER.weight_decay
    torch.optim.SGD(layers.parameters(), rate, HYPER.momentum, weight_decay=decay, nesterov=True).step()
    result = fleet.train(begun, "a")
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert result.metrics["teacher_labels"] == by_teacher
    require_close({n: leaf + result.tree[n] for n, leaf in student(begun.tree).items()}, dict(layers.state_dict()))


def test_the_average_moves_the_student_and_the_teacher_waits_for_the_next_supervised_steps():
    fleet = make("abc")
    begun = fleet.play()
    for name, leaf in student(begun.tree).items():
        moved = torch.stack([fleet.results[device].tree[name].double() for device in "abc"]).mean(0)
        assert fleet.state.tree[name].dtype == leaf.dtype
        torch.testing.assert_close(fleet.state.tree[name].double(), leaf + moved, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(fleet.state.tree[name], begun.tree[name]) for name in begun.tree if name.startswith("teach"))
    assert all(state == State() for state in fleet.devices.values()), "devices keep nothing"
    assert fleet.algorithm.evaluated(fleet.state).keys() == fleet.whole.tree().keys()


def test_examples_weigh_only_where_the_plan_says_so():
    weighted, uniform = (make("ab", weighting=kind) for kind in ("examples", "uniform"))
    for fleet in (weighted, uniform):
        fleet.data["b"] = fleet.data["b"].subset(torch.arange(4))
        fleet.play()
    assert weighted.results["b"].num_examples == 4
    assert not torch.equal(weighted.state.tree["0.weight"], uniform.state.tree["0.weight"])


def test_two_networks_go_down_and_one_comes_up_and_a_network_that_does_not_label_does_not_travel():
    """To the byte. The divergence that a device measured decides what it is sent the next time."""
    fleet = make("ab", switch_divergence=1.0)
    fleet.play()
    size = payload_bytes(fleet.whole.tree())
    assert [payload_bytes(fleet.sent[device]) for device in "ab"] == [2 * size, 2 * size]
    assert [payload_bytes(fleet.results[device].tree) for device in "ab"] == [size, size]
    fleet.state.facts[f"{DIVERGENCE}/a"] = 1.05
    fleet.play()
    assert [payload_bytes(fleet.sent[device]) for device in "ab"] == [size, 2 * size]
    assert fleet.results["a"].metrics["teacher_labels"] == 0
    assert fleet.results["a"].metrics[DIVERGENCE] < 1.0, "the student's answers are even again"
    fleet.play()
    assert payload_bytes(fleet.sent["a"]) == 2 * size
    never = make("a", switch_divergence=0.0)
    never.play()
    assert payload_bytes(never.sent["a"]) == size


def test_a_device_whose_teacher_knows_one_class_alone_labels_by_itself_at_once():
    """The first time too, when both networks came: a teacher whose bias says 'class 1' to everything."""
    fleet = make("a", switch_divergence=0.5)
    begun = fleet.begin()
    begun.tree["teacher/10.bias"] += torch.tensor([0.0, 50.0, 0.0])
    metrics = fleet.train(begun, "a").metrics
    assert metrics[DIVERGENCE] == pytest.approx(math.log(3), abs=1e-3)
    assert metrics["teacher_labels"] == 0


def test_labels_that_a_device_has_are_not_looked_at():
    fleet, blind = make("a"), make("a")
    fleet.data["a"].labels.fill_(2)
    assert not fleet.algorithm.reads_labels
    fleet.play()
    blind.play()
    assert all(torch.equal(leaf, blind.state.tree[name]) for name, leaf in fleet.state.tree.items())


def test_the_servers_training_changes_no_state_but_its_own():
    fleet = make("a")
    before = {name: leaf.clone() for name, leaf in fleet.state.tree.items()}
    first = fleet.begin()
    assert all(torch.equal(leaf, fleet.state.tree[name]) for name, leaf in before.items())
    fleet.number = 0
    again = fleet.begin()
    assert all(torch.equal(leaf, again.tree[name]) for name, leaf in first.tree.items())


def test_the_first_rounds_supervised_steps_are_more():
    fleet = make("a", warmup_steps=4)
    followed = []
    for _ in range(2):
        fleet.play()
        followed.append(fleet.state.facts["followed"])
    assert followed == [3 + 4, 2 * 3 + 4]


def test_a_device_refuses_what_are_not_one_or_two_networks():
    fleet = make("a")
    begun = fleet.begin()
    told = fleet.told["a"]
    for spoilt in ({"teacher/0.weight"}, {"0.weight"}, set(teacher(begun.tree))):
        down = {name: leaf for name, leaf in begun.tree.items() if name not in spoilt}
        with pytest.raises(WireError, match=naming(len(down))) as caught:
            fleet.algorithm.local(fleet.whole, State(), down, Own(fleet.data["a"], told), told)
        assert caught.value.reason == "shape"
    nobody = Own(fleet.data["a"].subset(torch.arange(0)), told)
    with pytest.raises(TaskFailed, match="examples"):
        fleet.algorithm.local(fleet.whole, State(), begun.tree, nobody, told)


def test_an_update_that_is_not_a_whole_student_is_refused():
    fleet = make("a")
    begun = fleet.begin()
    up = fleet.train(begun, "a").tree
    with pytest.raises(WireError, match=naming(repr(next(iter(up))))):
        fleet.algorithm.check_update(fleet.told["a"], fleet.sent["a"], {n: up[n] for n in list(up)[1:]})
    with pytest.raises(WireError) as caught:
        fleet.algorithm.check_update(fleet.told["a"], fleet.sent["a"], up | {"teacher/0.weight": up["0.weight"]})
    assert caught.value.reason == "unknown-tensor"


def test_a_class_without_labels_is_named():
    fleet = make("a")
    fleet.labelled = fleet.labelled.subset((fleet.labelled.labels != 1).nonzero().flatten())
    with pytest.raises(ConfigError, match=naming("server_data", "class 1")):
        fleet.begin()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"threshold": 1.0}, "threshold"),
        ({"inertia": 1.0}, "inertia"),
        ({"supervised_steps": 0}, "supervised_steps"),
        ({"switch_divergence": -0.1}, "switch_divergence"),
        ({"switch_divergence": math.nan}, "switch_divergence"),
        ({"switch_divergence": math.inf}, "switch_divergence"),
        ({"weighting": "size"}, "weighting"),
        ({"server_views": "none"}, "server_views"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        fedswitch(**options)


def test_without_an_epoch_nothing_is_trained_or_tested():
    fleet = make("a")
    begun = fleet.begin()
    fleet.told = {"a": Assignment(seed=1, hyper=msgspec.structs.replace(HYPER, local_epochs=0))}
    result = fleet.train(begun, "a")
    assert (result.loss, result.metrics) == (None, {})
    assert not any(leaf.any() for leaf in result.tree.values())
