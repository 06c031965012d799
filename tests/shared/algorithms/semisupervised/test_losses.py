"""SemiSFL losses against plain loops of the paper, and their properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.algorithms.semisupervised.losses import PseudoLabels, References, consistency, contrast, unit_rows

THREE = 3


def draw(anchors: int, references: int, seed: int, width: int = 5) -> tuple[torch.Tensor, torch.Tensor, References]:
    """Return anchors with labels, and references of which about half are confident."""
    generator = torch.Generator().manual_seed(seed)

    def rows(count):
        return unit_rows(torch.randn(count, width, generator=generator))

    def labels(count):
        return torch.randint(0, THREE, (count,), generator=generator)

    sure = torch.rand(references, generator=generator) < 0.5
    return rows(anchors), labels(anchors), References(rows(references), labels(references), sure)


def textbook(anchors, labels, references, temperature):
    """Equation (3) or (5) of one anchor after the other, in Python's floats."""
    losses = []
    for anchor, label in zip(anchors.tolist(), labels.tolist(), strict=True):
        logits = [
            sum(a * b for a, b in zip(anchor, one, strict=True)) / temperature
            for one in references.projections.tolist()
        ]
        total = sum(math.exp(one) for one in logits)
        positives = [
            -math.log(math.exp(logit) / total)
            for logit, own, sure in zip(logits, references.labels.tolist(), references.confident.tolist(), strict=True)
            if sure and own == label
        ]
        losses.append(sum(positives) / len(positives) if positives else 0.0)
    return losses


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 1000), st.floats(0.1, 2.0))
def test_contrast_is_the_papers_sum(anchors, references, seed, temperature):
    case = draw(anchors, references, seed)
    assert contrast(*case, temperature).tolist() == pytest.approx(textbook(*case, temperature), abs=2e-5)


def test_contrast_does_not_depend_on_the_order_of_references():
    anchors, labels, references = draw(6, 20, 1)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(2))
    mixed = References(references.projections[order], references.labels[order], references.confident[order])
    torch.testing.assert_close(contrast(anchors, labels, references, 0.2), contrast(anchors, labels, mixed, 0.2))


def test_contrast_of_equal_logits_is_the_logarithm_of_how_many_there_are():
    same = torch.eye(1, 4).expand(7, 4)
    references = References(same, torch.tensor([0, 0, 1, 1, 2, 2, 2]), torch.ones(7, dtype=torch.bool))
    assert contrast(same[:2], torch.tensor([0, 1]), references, 0.2).tolist() == pytest.approx([math.log(7)] * 2)


@given(st.integers(0, 1000))
def test_contrast_is_at_least_the_logarithm_of_the_positives(seed):
    anchors, labels, references = draw(5, 30, seed)
    count = ((labels[:, None] == references.labels) & references.confident).sum(1)
    losses = contrast(anchors, labels, references, 0.2)
    assert (losses[count > 0] >= count[count > 0].log() - 1e-5).all()


def test_an_anchor_without_a_positive_costs_nothing_and_pulls_nothing():
    anchors, _, references = draw(3, 8, 3)
    anchors = anchors.requires_grad_()
    losses = contrast(anchors, torch.full((3,), 9), references, 0.2)
    losses.sum().backward()
    assert losses.tolist() == [0.0] * 3
    assert not anchors.grad.any()


def test_contrast_stays_finite_at_a_small_temperature():
    anchors, labels, references = draw(8, 40, 4)
    anchors = anchors.requires_grad_()
    losses = contrast(anchors, labels, references, 0.01)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert anchors.grad.isfinite().all()


def test_unsure_references_are_no_positives_but_count_as_others():
    anchors, labels, references = draw(4, 12, 5)
    unsure = References(references.projections, references.labels, torch.zeros(12, dtype=torch.bool))
    more = References.concatenate(references, unsure)
    assert not contrast(anchors, labels, unsure, 0.2).any()
    doubled = contrast(anchors, labels, more, 0.2)
    some = contrast(anchors, labels, references, 0.2)
    torch.testing.assert_close(doubled[some > 0], some[some > 0] + math.log(2))


def test_a_pseudo_label_is_sure_only_above_the_threshold():
    logits = torch.tensor([[0.0, math.log(19.0)], [math.log(3.0), 0.0]])
    pseudo = PseudoLabels.of(logits, 0.9)
    assert pseudo.labels.tolist() == [1, 0]
    assert pseudo.confident.tolist() == [True, False]
    assert not PseudoLabels.of(torch.zeros(1, 2), 0.5).confident.any(), "at the threshold it is not above it"


def test_consistency_divides_by_all_examples_and_an_unsure_one_has_no_gradient():
    """Property 9: a masked mean over b, not over those that are kept."""
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(6)).requires_grad_()
    pseudo = PseudoLabels(torch.tensor([0, 1, 2, 0]), torch.tensor([True, False, False, True]))
    loss = consistency(logits, pseudo).mean()
    rows = logits.detach().log_softmax(1)
    assert loss.item() == pytest.approx(-(rows[0, 0] + rows[3, 0]).item() / 4)
    loss.backward()
    assert logits.grad[[0, 3]].abs().sum() > 0
    assert not logits.grad[[1, 2]].any()


def test_an_unsure_anchor_is_regularized_all_the_same():
    """Property 2: anchors are not filtered; the teacher, whose projections are the references, has no gradient here."""
    anchors, labels, references = draw(6, 20, 7)
    anchors = anchors.requires_grad_()
    contrast(anchors, labels, references, 0.2).sum().backward()
    has_positive = ((labels[:, None] == references.labels) & references.confident).any(1)
    assert has_positive.any()
    assert (anchors.grad.abs().sum(1) > 0).tolist() == has_positive.tolist()
