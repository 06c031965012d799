"""Networks by name: where they may be cut, and that a seed makes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared.errors import ConfigError
from shared.models import MODELS
from shared.models.base import Model
from shared.models.build import build_blank, build_initial
from shared.models.kaiming import WEIGHTED
from shared.protocol.messages import Spec
from shared.subnetworks import neurons
from shared.tensors.generators import seed_torch
from tests.naming import naming

SMALL = {
    "alexnet": ({"side": 8, "width": 0.1, "hidden": 9, "classes": 4}, (3, 3, 8, 8)),
    "autoencoder": ({"features": 2, "steps": 3, "channels": 2, "hidden": 5, "code": 3}, (3, 2, 3, 2)),
    "cnn": ({"channels": 3, "side": 8, "width": 2, "hidden": 5, "classes": 4}, (3, 3, 8, 8)),
    "cnn1d": ({"channels": 2, "window": 12, "width": 3, "hidden": 5, "classes": 4}, (3, 2, 12)),
    "conv_autoencoder": ({"channels": 2, "side": 8, "width": 3, "code": 2}, (3, 2, 8, 8)),
    "ds_cnn": ({"channels": 2, "frames": 9, "coefficients": 4, "width": 3, "blocks": 2, "classes": 4}, (3, 2, 9, 4)),
    "gru": ({"steps": 5, "features": 3, "hidden": 4, "layers": 2, "outputs": 4}, (3, 3, 5)),
    "lenet": ({"channels": 2, "side": 14, "width": 3, "classes": 4}, (3, 2, 14, 14)),
    "mlp": ({"features": 12, "hidden": 5, "classes": 4}, (3, 3, 2, 2)),
    "mobilenet_v3_small": ({"channels": 1, "side": 32, "width": 0.1, "classes": 4}, (3, 1, 32, 32)),
    "resnet20": ({"channels": 1, "width": 2, "classes": 4}, (3, 1, 9, 9)),
    "spu_cifar": ({"channels": 2, "side": 9, "width": 3, "classes": 4}, (3, 2, 9, 9)),
    "spu_emnist": ({"channels": 2, "side": 9, "width": 3, "classes": 4}, (3, 2, 9, 9)),
    "spu_speech": ({"channels": 2, "side": 9, "width": 3, "classes": 4}, (3, 2, 9, 9)),
    "tcn": ({"steps": 5, "features": 3, "width": 4, "blocks": 2, "kernel": 2, "outputs": 4}, (3, 3, 5)),
    "unet": ({"channels": 1, "side": 16, "width": 2, "depth": 2, "classes": 4}, (3, 1, 16, 16)),
    "vgg13": ({"channels": 1, "width": 0.05, "classes": 4}, (3, 1, 28, 28)),
    "vgg16": ({"width": 0.05, "norm": "none", "classes": 4}, (3, 3, 33, 20)),
    "vgg19": ({"width": 0.05, "classes": 4}, (3, 3, 32, 32)),
}
"""Options and inputs; of other shapes than the defaults where a network takes them."""

OUTPUTS = {
    "autoencoder": (64,),
    "cnn1d": (6,),
    "conv_autoencoder": (1, 32, 32),
    "ds_cnn": (12,),
    "gru": (1,),
    "mobilenet_v3_small": (1000,),
    "spu_emnist": (62,),
    "spu_speech": (35,),
    "tcn": (1,),
    "unet": (2, 64, 64),
}
"""Of the defaults, where they are not 10."""
SMALL_OUTPUTS = {"autoencoder": (2, 3, 2), "conv_autoencoder": (2, 8, 8), "unet": (4, 16, 16)}
DECLARED = {"side", "frames", "steps", "coefficients"}
"""Options of some networks that change their declared example alone."""


@pytest.fixture(params=sorted(MODELS))
def name(request) -> str:
    """Every registered model; one without inputs here fails."""
    return request.param


@pytest.fixture
def spec(name) -> Spec:
    return Spec(name=name, options=SMALL[name][0])


@pytest.fixture
def inputs(name) -> torch.Tensor:
    return torch.randn(SMALL[name][1], generator=torch.Generator().manual_seed(2))


def test_outputs_have_one_column_a_class(spec, inputs):
    """With small options, of which each has an effect, and with the defaults on what the model is made for."""
    assert build_initial(spec, 1).layers(inputs).shape == (3, *SMALL_OUTPUTS.get(spec.name, (4,)))
    usual = build_blank(Spec(name=spec.name))
    outputs = usual.layers(torch.empty((3, *usual.example), device="meta"))
    assert outputs.shape == (3, *OUTPUTS.get(spec.name, (10,)))
    for key in spec.options:
        rest = {other: value for other, value in spec.options.items() if other != key}
        shapes = [leaf.shape for leaf in build_blank(Spec(name=spec.name, options=rest)).layers.parameters()]
        assert shapes != [leaf.shape for leaf in build_blank(spec).layers.parameters()] or key in DECLARED


def test_a_cut_changes_nothing(spec, inputs):
    """Bottom, then top, is the whole: outputs, every gradient and every buffer bit for bit, at every legal cut."""
    model = build_initial(spec, 1)
    whole = model.layers(inputs)
    whole.square().sum().backward()
    expected = [weight.grad.clone() for weight in model.layers.parameters()]
    buffers = [buffer.clone() for buffer in model.layers.buffers()]
    assert model.cut_places
    for cut in model.cut_places:
        model = build_initial(spec, 1)
        smashed = model.below(cut)(inputs)
        received = smashed.detach().requires_grad_(True)
        split = model.above(cut)(received)
        split.square().sum().backward()
        smashed.backward(received.grad)
        assert torch.equal(split, whole)
        assert all(torch.equal(w.grad, e) for w, e in zip(model.layers.parameters(), expected, strict=True))
        assert all(torch.equal(b, e) for b, e in zip(model.layers.buffers(), buffers, strict=True))


def test_both_sides_of_a_cut_are_the_whole_by_name(spec):
    """A device without a parameter has nothing to learn, a server without one nothing to do; cuts ascend."""
    model = build_initial(spec, 1)
    assert list(model.cut_places) == sorted(set(model.cut_places))
    for cut in model.cut_places:
        below, above = dict(model.below(cut).state_dict()), dict(model.above(cut).state_dict())
        assert list(model.below(cut).parameters())
        assert list(model.above(cut).parameters())
        assert list(below | above) == list(model.tree())
        assert not below.keys() & above.keys()


def test_a_cut_is_named_by_the_layers_with_weights_below_it(spec):
    """Convolutions, linear and recurrent layers."""
    model = build_blank(spec)
    for cut in model.cut_places:
        layers = [m for m in model.below(cut).modules() if isinstance(m, (*WEIGHTED, nn.GRU))]
        assert len(layers) == cut


def test_an_illegal_cut_is_told_with_the_legal_ones(spec):
    model = build_blank(spec)
    with pytest.raises(ConfigError, match=naming(99, ", ".join(map(str, model.cut_places)))):
        model.below(99)
    with pytest.raises(ConfigError, match=naming(1, "`cut`")):
        Model(nn.Sequential(nn.Flatten(), nn.Linear(4, 2))).above(1)


@pytest.mark.parametrize("cuts", [{1: 0}, {1: 3}, {1: -1}, {1: 2, 2: 1}, {2: 1, 1: 2}, {1: 1, 2: 1}])
def test_a_chain_refuses_cuts_that_are_none(cuts):
    with pytest.raises(ValueError, match="cut"):
        Model(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU()), cuts)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vgg19", {"width": 0.0}),
        ("vgg19", {"norm": "layer"}),
        ("alexnet", {"width": -1.0}),
        ("alexnet", {"side": 7}),
        ("alexnet", {"dropout": 2.0}),
        ("autoencoder", {"code": 0}),
        ("conv_autoencoder", {"side": 30}),
        ("ds_cnn", {"coefficients": 1}),
        ("gru", {"layers": 0}),
        ("mobilenet_v3_small", {"width": 0.0}),
        ("tcn", {"blocks": 0}),
        ("unet", {"side": 20}),
        ("cnn", {"kernel": 4}),
        ("cnn1d", {"window": 3}),
        ("lenet", {"side": 11}),
        ("lenet", {"width": 0}),
        ("resnet20", {"depth": 8}),
        ("spu_cifar", {"side": 3}),
        ("spu_emnist", {"width": 0}),
        ("spu_speech", {"side": 0}),
    ],
)
def test_options_that_make_no_network_are_refused(name, options):
    with pytest.raises(ConfigError, match=name):
        build_blank(Spec(name=name, options=options))


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (Spec(name="vgg19"), 20_040_522),
        (Spec(name="resnet20"), 269_722),
        (Spec(name="alexnet"), 35_855_178),
        (Spec(name="lenet"), 61_706),
        (Spec(name="mobilenet_v3_small"), 2_542_856),
        (Spec(name="spu_emnist"), 64_722),
        (Spec(name="spu_cifar"), 134_902),
        (Spec(name="spu_speech"), 26_285),
        (Spec(name="cnn", options={"kernel": 5, "width": 32, "hidden": 2048, "classes": 62}), 6_603_710),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_parameters_are_as_many_as_papers_say(spec, count):
    """Papers of the field print these; LEAF's FEMNIST network is `cnn` with larger options."""
    assert sum(leaf.numel() for leaf in build_blank(spec).layers.parameters()) == count


@pytest.mark.parametrize(
    ("name", "sizes", "bitmaps"),
    [
        ("spu_emnist", [12_434, 25_094, 38_042, 51_278, 64_802], 6),
        ("spu_cifar", [5_236, 20_558, 45_966, 81_460, 134_946], 29),
        ("spu_speech", [3_725, 8_215, 13_505, 19_595, 26_485], 14),
    ],
)
def test_fedspus_networks_send_what_its_paper_counts(name, sizes, bitmaps):
    """Active parameters, running statistics included, of a fifth to all of the neurons, and bytes of bitmaps."""
    layers = build_blank(Spec(name=name)).layers
    found = neurons.read_chain(layers)
    tree = dict(layers.state_dict())
    drawn = [neurons.draw_neurons(found.hidden, keep, 3) for keep in (0.2, 0.4, 0.6, 0.8, 1.0)]
    assert [neurons.count_parameters(found.index(one), tree) for one in drawn] == sizes
    assert sum(leaf.nbytes for leaf in neurons.pack(drawn[0], found.hidden).values()) == bitmaps


def test_a_blank_network_takes_no_memory():
    """One of four terabytes is built, and every leaf of it is without storage; initialisation included."""
    model = build_blank(Spec(name="alexnet", options={"hidden": 10**6}))
    assert sum(leaf.numel() for leaf in model.layers.parameters()) > 10**12
    assert all(leaf.is_meta for leaf in model.tree().values())
    assert all(leaf.is_meta for leaf in build_blank(Spec(name="vgg13")).tree().values())


@pytest.mark.parametrize(("name", "options"), [("alexnet", {}), ("vgg19", {"norm": "none"})])
def test_activations_keep_their_scale_through_depth(name, options):
    """Kaiming's rule: with torch's own the last features are a hundredth of these, and hardly depend on the input."""
    model = build_initial(Spec(name=name, options={"width": 0.25} | options), 3)
    flowing = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    for layer in model.layers[:-1]:
        flowing = layer(flowing)
        if isinstance(layer, nn.MaxPool2d):
            assert 0.3 < flowing.square().mean().sqrt().item() < 10


def test_initial_parameters_are_a_function_of_the_seed(spec):
    """The same whatever torch's global generator did before; other seeds give other weights."""
    first = build_initial(spec, 7).tree()
    torch.rand(5)
    again, other = build_initial(spec, 7).tree(), build_initial(spec, 8).tree()
    assert list(first) == list(again)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first if first[key].ndim > 1)


def test_torchs_global_generator_is_left_alone(spec):
    """Also where building fails."""
    before = torch.random.get_rng_state()
    build_initial(spec, 7)
    with pytest.raises(ConfigError):
        build_initial(Spec(name=spec.name, options={"classes": "ten"}), 7)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_seeded_block():
    """Inside, draws are the seed's; nested blocks do not disturb the outer one; after it, all is as before."""
    before = torch.random.get_rng_state()
    with seed_torch(1):
        first = torch.rand(2)
        with seed_torch(2):
            torch.rand(9)
        second = torch.rand(2)
    with seed_torch(1):
        assert torch.equal(torch.rand(4), torch.cat([first, second]))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_tree_is_the_networks_own(spec, inputs):
    """Not a copy: what is written into a leaf is what the network computes with."""
    model = build_initial(spec, 1)
    for leaf in model.tree().values():
        leaf.zero_()
    assert model.layers.eval()(inputs).abs().sum().item() == 0
