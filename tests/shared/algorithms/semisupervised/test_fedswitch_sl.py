"""SemiSFL without single loss terms, and with a switched labeller."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from shared.algorithms.base import Cohort
from shared.algorithms.semisupervised.learner import Learner
from shared.algorithms.semisupervised.semisfl import VARIANTS
from shared.algorithms.semisupervised.semisfl_server import ANSWERS, LABELLER, decide_labellers
from shared.algorithms.semisupervised.settings import SemisflSettings
from shared.data.views.pair import make_views
from shared.errors import WireError
from shared.protocol.messages import derive_seed
from shared.tensors.tree import State
from tests.naming import naming
from tests.shared.algorithms.semisupervised.test_semisfl import HYPER, Fleet, bottom, require_close
from tests.shared.algorithms.sessions import Own

PLAIN = {"contrastive": False, "clustering": False}
NEVER_TEACHER, ALWAYS_TEACHER = {"switch": True, "switch_divergence": 0.0}, {"switch": True, "switch_divergence": 9.0}


def whole(fleet: Fleet, leaves, inputs, *, train: bool):
    fleet.skeleton.layers.train(train)
    return functional_call(fleet.skeleton.layers, leaves, (inputs,))


def views_of(fleet: Fleet, told, step: int = 1):
    """Return a device's weak and strong view of its first batch."""
    inputs, _ = next(iter(Own(fleet.data["a"], told)))
    return make_views(inputs, ("weak", "strong"), derive_seed(told.seed, step, "views"), mirrors=False)


def test_without_both_terms_a_session_step_is_that_of_fixmatch():
    """Cross-entropy with the teacher's sure labels of the weak view, averaged over the batch, and SGD: nothing else."""
    fleet = Fleet("a", "cnn", steps=1, **PLAIN)
    before = fleet.begin()
    told = fleet.algorithm.assign(before, fleet.cohort, {}, 1)["a"]
    weak, strong = views_of(fleet, told)
    names = fleet.skeleton.layers.state_dict()
    student = {name: before.tree[name].clone().requires_grad_() for name in names}
    with torch.no_grad():
        teacher = {name: before.tree[f"teacher/{name}"] for name in names}
        likeliest, labels = whole(fleet, teacher, weak, train=False).softmax(1).max(1)
    sure = likeliest > 0.34
    assert sure.any()
    each = functional.cross_entropy(whole(fleet, student, strong, train=True), labels, reduction="none")
    (each * sure).mean().backward()
    torch.optim.SGD(student.values(), HYPER.learning_rate, weight_decay=HYPER.weight_decay).step()
    fleet.number = 0
    fleet.play()
    require_close({name: fleet.state.tree[name] for name in names}, {k: leaf.detach() for k, leaf in student.items()})


def test_without_the_contrastive_term_a_supervised_step_is_cross_entropys_alone():
    fleet = Fleet("a", "cnn", supervised_steps=1, **PLAIN)
    batch = fleet.labelled.inputs[:4], fleet.labelled.labels[:4]
    learner = Learner.from_tree(fleet.settings, fleet.skeleton, fleet.state.tree, 0)
    names = fleet.skeleton.layers.state_dict()
    student = {name: fleet.state.tree[name].clone().requires_grad_() for name in names}
    functional.cross_entropy(whole(fleet, student, batch[0], train=True), batch[1]).backward()
    torch.optim.SGD(student.values(), HYPER.learning_rate, weight_decay=HYPER.weight_decay).step()
    learner.supervised_step(batch[0], None, batch[1], HYPER)
    require_close(
        {k: leaf.detach() for k, leaf in learner.weights.items()}, {k: leaf.detach() for k, leaf in student.items()}
    )


def test_without_both_terms_there_is_no_head_and_nothing_is_projected_or_queued():
    """The saving is real: no layer of a head is there to be computed, and no second view of labelled examples."""
    fleet, usual = Fleet("ab", **PLAIN), Fleet("ab")
    driven, other = fleet.play(), usual.play()
    for state in (driven.state, fleet.state):
        assert not any(name.startswith(("head/", "teacher-head/")) for name in state.tree)
        assert not sum(leaf.numel() for name, leaf in state.tree.items() if name.endswith("projections"))
        assert not any(int(leaf) for name, leaf in state.tree.items() if name.endswith("/written"))
    assert any(name.startswith("head/") for name in other.state.tree)
    assert int(other.state.tree["queue/unlabelled/written"]) == 2 * 2 * 4


@pytest.mark.parametrize(
    ("off", "moves_in_steps", "moves_in_session"), [("contrastive", False, True), ("clustering", True, False)]
)
def test_each_term_can_be_left_out_alone(off, moves_in_steps, moves_in_session):
    """The head is moved by the term that is left, and by no other; the other's queue is there only for it."""
    fleet = Fleet("ab", **{off: False})
    first = {name: leaf.clone() for name, leaf in fleet.state.tree.items() if name.startswith("head/")}
    begun = fleet.begin()
    assert first
    assert any(not torch.equal(begun.tree[name], leaf) for name, leaf in first.items()) == moves_in_steps
    fleet.number = 0
    driven = fleet.play()
    assert any(not torch.equal(driven.state.tree[name], begun.tree[name]) for name in first) == moves_in_session
    assert int(driven.state.tree["queue/labelled/written"]) == 3 * 4
    assert (int(driven.state.tree["queue/unlabelled/written"]) > 0) == moves_in_session


def test_what_a_device_was_answered_decides_who_labels_its_next_session():
    """By the mean over the session, of each device for itself; nothing of it stays in the state."""
    settings = SemisflSettings(switch=True, switch_divergence=0.5)
    found = decide_labellers(settings, {f"{ANSWERS}a": torch.tensor([9.0, 0.5, 0.5]), f"{ANSWERS}b": torch.ones(3)})
    assert found == {f"{LABELLER}a": "student", f"{LABELLER}b": "teacher"}
    fleet = Fleet("ab", **PLAIN, **NEVER_TEACHER)
    driven = fleet.play()
    sums = {name: leaf for name, leaf in driven.state.tree.items() if name.startswith(ANSWERS)}
    assert {name: leaf.shape for name, leaf in sums.items()} == {f"{ANSWERS}{one}": (3,) for one in "ab"}
    assert [float(leaf.sum()) for leaf in sums.values()] == pytest.approx([2 * 4, 2 * 4])  # steps, examples of each
    assert not any(name.startswith(ANSWERS) for name in fleet.state.tree)
    assert {fleet.state.facts[LABELLER + one] for one in "ab"} == {"student"}


def test_a_device_that_the_student_labels_is_sent_its_bottom_alone():
    """Half the bytes down; as many up. The first round is the teacher's, since nothing was predicted yet."""
    fleet = Fleet("a", **PLAIN, **NEVER_TEACHER)
    told = fleet.algorithm.assign(fleet.state, fleet.cohort, {}, 1)["a"]
    below = set(fleet.whole.below(1).state_dict())
    assert len(fleet.algorithm.broadcast(fleet.state, "a", told)) == 2 * len(below)
    fleet.play()
    assert set(fleet.algorithm.broadcast(fleet.state, "a", told)) == below
    driven = fleet.play()
    assert {name for up in driven.ups for name in up["a"]} == {"features", "teacher"}


def test_the_students_labels_are_the_whole_students_of_the_weak_view():
    """Bottom and top evaluate, by the running statistics that they have then; the teacher has no say."""
    fleet = Fleet("a", "normed", steps=1, **PLAIN, **NEVER_TEACHER)
    fleet.play()
    begun = fleet.begin()
    told = fleet.algorithm.assign(begun, fleet.cohort, {}, 2)["a"]
    weak, _ = views_of(fleet, told)
    names = fleet.skeleton.layers.state_dict()
    expected = whole(fleet, {name: begun.tree[name] for name in names}, weak, train=False).softmax(1).sum(0)
    fleet.number = 1
    driven = fleet.play()
    torch.testing.assert_close(driven.state.tree[f"{ANSWERS}a"], expected.detach())
    student = {name: begun.tree[name] for name in names}
    seen = functional_call(fleet.skeleton.below(1).eval(), bottom(fleet.skeleton, student), (weak,))
    torch.testing.assert_close(driven.ups[0]["a"]["teacher"], seen.detach())


def test_a_switch_that_never_acts_changes_no_bit():
    usual, switched = Fleet("ab"), Fleet("ab", **ALWAYS_TEACHER)
    for fleet in (usual, switched, usual, switched):
        fleet.play()
    assert usual.state.tree.keys() == switched.state.tree.keys()
    assert all(torch.equal(leaf, switched.state.tree[name]) for name, leaf in usual.state.tree.items())


def test_each_devices_labeller_is_its_own():
    """In one step of two devices, of which the student labels one: outputs are those of each labeller alone."""
    fleet = Fleet("ab", "cnn", **PLAIN)
    begun = fleet.begin()
    for name in begun.tree:
        if name.startswith("teacher/"):
            begun.tree[name].add_(0.1)  # so that the two differ
    learner = Learner.from_tree(fleet.settings, fleet.skeleton, begun.tree, 0)
    shape = fleet.skeleton.below(1)(torch.zeros(1, device="meta").expand(1, *fleet.whole.example)).shape[1:]
    generator = torch.Generator().manual_seed(3)
    sent = {d: tuple(torch.rand(n, *shape, generator=generator) for _ in range(2)) for d, n in (("a", 4), ("b", 2))}
    both = learner.session_pass(sent, {"b"}).answers
    torch.testing.assert_close(both["a"], learner.session_pass({"a": sent["a"]}).answers["a"])
    torch.testing.assert_close(both["b"], learner.session_pass({"b": sent["b"]}, {"b"}).answers["b"])
    assert not torch.allclose(both["b"], learner.session_pass({"b": sent["b"]}).answers["b"])


def test_one_bottom_is_refused_where_nothing_is_switched():
    fleet = Fleet("a", **PLAIN)
    told = fleet.algorithm.assign(fleet.state, fleet.cohort, {}, 1)["a"]
    half = {name: fleet.state.tree[name] for name in fleet.whole.below(1).state_dict()}
    with pytest.raises(WireError, match=naming(len(half))) as caught:
        next(fleet.algorithm.local(fleet.skeleton, State(), half, Own(fleet.data["a"], told), told))
    assert caught.value.reason == "shape"


@pytest.mark.parametrize("divergence", [-0.1, math.inf, math.nan])
def test_a_divergence_that_is_none_is_refused(divergence):
    with pytest.raises(ValueError, match="switch_divergence"):
        SemisflSettings(switch_divergence=divergence)


def test_its_name_is_the_method_without_both_terms_with_the_switch():
    algorithm = VARIANTS["fedswitch_sl"]()
    settings = algorithm.local.args[0]
    assert (settings.contrastive, settings.clustering, settings.switch) == (False, False, True)
    state = algorithm.init(Fleet("a").whole, 5)
    cohort = Cohort(("a",), HYPER, seed=1, rounds=2)
    assert algorithm.assign(state, cohort, {}, 1)["a"].steps == settings.steps
