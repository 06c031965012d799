"""What a cut means, against the tables of the papers and against running it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shared.errors import ConfigError
from shared.models import MODELS
from shared.models.build import build_initial
from shared.models.cost import Part, cut_table, step_flops
from shared.protocol.messages import Spec
from tests.naming import naming

VGG19 = [
    (4, (128, 8, 8), 8192, 260_928, 259_776, "96.1", "2.10"),
    (8, (256, 4, 4), 4096, 2_328_384, 2_324_160, "228.3", "1.05"),
    (12, (512, 2, 2), 2048, 10_592_064, 10_581_696, "360.4", "0.52"),
    (16, (512, 1, 1), 512, 20_035_392, 20_018_880, "398.1", "0.13"),
]


def test_vgg_19_is_cut_as_the_paper_cuts_it():
    """FedSL's networks on CIFAR-10 at batch 64: features, parameters, prunable ones, MMAC a sample, their megabytes."""
    found = cut_table(Spec(name="vgg19"))
    assert found.whole.parameters == 20_040_522
    rows = [
        (
            *(cut.cut, cut.shape, cut.features, cut.below.parameters, cut.below.prunable),
            *(f"{cut.below.forward_macs / 1e6:.1f}", f"{4 * 64 * cut.features / 1e6:.2f}"),
        )
        for cut in found.cuts
        if cut.cut > 2
    ]
    assert rows == VGG19


def test_bytes_are_those_of_the_protocols_trees():
    """At batch B: 4·B·D bytes of features and a byte for each label, 8 beyond 256 classes; 4·B·D and a loss back."""
    (cut,) = cut_table(Spec(name="mlp", options={"hidden": 32}), batch_size=5).cuts
    assert (cut.features_bytes, cut.gradient_bytes) == (4 * 5 * 32 + 5, 4 * 5 * 32 + 4)
    (most,) = cut_table(Spec(name="mlp", options={"hidden": 32, "classes": 256}), batch_size=5).cuts
    (more,) = cut_table(Spec(name="mlp", options={"hidden": 32, "classes": 257}), batch_size=5).cuts
    assert (most.features_bytes, more.features_bytes) == (4 * 5 * 32 + 5, 4 * 5 * 32 + 8 * 5)


def test_a_perceptron_costs_what_its_shapes_say():
    found = cut_table(Spec(name="mlp", options={"features": 64, "hidden": 32, "classes": 10}))
    assert found.whole == Part(parameters=65 * 32 + 33 * 10, prunable=64 * 32 + 32 * 10, forward_macs=64 * 32 + 32 * 10)
    assert found.cuts[0].below == Part(parameters=65 * 32, prunable=64 * 32, forward_macs=64 * 32)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"alexnet", "vgg13", "vgg16", "vgg19"}))
def test_it_is_what_running_the_network_shows(name):
    """Shapes, and multiplications counted while they are done, at every cut; parameters as they lie in memory."""
    model = build_initial(Spec(name=name), 1)
    for cut in cut_table(Spec(name=name)).cuts:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            features = model.below(cut.cut).eval()(torch.zeros(1, *model.example))
        assert tuple(features.shape[1:]) == cut.shape
        assert features.numel() == cut.features
        assert counter.get_total_flops() == 2 * cut.below.forward_macs
        assert sum(leaf.numel() for leaf in model.below(cut.cut).parameters()) == cut.below.parameters


def test_resnet_20_is_as_heavy_as_its_paper_says():
    """40.6 million multiplications; all but BatchNorm and the head's biases prunable."""
    whole = cut_table(Spec(name="resnet20")).whole
    assert f"{whole.forward_macs / 1e6:.1f}" == "40.6"
    assert whole.prunable == 267_696 + 640


def test_other_examples_give_other_cuts():
    """28 x 28 pixels shrink to 14, 7, 4, 2 and 1: a row that is left over counts."""
    spec = Spec(name="vgg13", options={"channels": 1})
    assert [cut.shape[1:] for cut in cut_table(spec, (1, 28, 28)).cuts] == [(14, 14), (7, 7), (4, 4), (2, 2), (1, 1)]


def test_examples_that_do_not_fit_are_the_users_mistake():
    with pytest.raises(ConfigError, match=naming((3, 7))):
        cut_table(Spec(name="cnn"), (3, 7))
    with pytest.raises(ConfigError, match="nosuch"):
        cut_table(Spec(name="nosuch"))


def test_inputs_that_a_network_does_not_take_are_named():
    """Before a replay begins, which counts the work of a step first."""
    with pytest.raises(ConfigError, match=naming("model", (1, 8, 8))):
        step_flops(Spec(name="mlp", options={"features": 10}), torch.Size((1, 8, 8)), 4)


def test_a_depthwise_convolution_is_trained_for_thrice_its_forward():
    """torch counts the gradient of a weight once per group: 64 times too much here."""
    layers = cut_table(Spec(name="ds_cnn")).whole
    first = 64 * 40 * 25 * 5  # its inputs need no gradient
    assert step_flops(Spec(name="ds_cnn"), torch.Size((1, 49, 10)), 4) == 2 * 4 * (3 * layers.forward_macs - first)


def test_networks_are_as_heavy_as_their_papers_say():
    """MobileNetV3-small: 56 million multiplications (torchvision's 56.5); DS-CNN: 5.4 million operations."""
    assert f"{cut_table(Spec(name='mobilenet_v3_small')).whole.forward_macs / 1e6:.1f}" == "56.5"
    assert 2 * cut_table(Spec(name="ds_cnn")).whole.forward_macs == pytest.approx(5.4e6, rel=0.02)
    assert cut_table(Spec(name="unet")).cuts[0].features_bytes == 64 * (4 * 16 + 1) * 64 * 64, "a label for each pixel"
