"""Pretrained weights: both formats, names and shapes that differ, and files that hold something else."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shared.errors import ConfigError
from shared.models.base import Model
from shared.models.build import build_blank, build_initial
from shared.models.weights import load_weights
from shared.protocol.messages import Spec
from shared.tensors.weights_file import digest_weights, read_weights
from tests.naming import naming

SPEC = Spec(name="spu_emnist", options={"width": 3})


def stored(seed: int = 8) -> dict[str, torch.Tensor]:
    return {name: leaf.clone() for name, leaf in build_initial(SPEC, seed).tree().items()}


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "wrapped.pth"])
def test_the_weights_of_a_file_are_those_of_the_network(tmp_path, name):
    path, weights = tmp_path / name, stored()
    if path.suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save({"state_dict": weights, "epoch": 3} if name == "wrapped.pth" else weights, path)
    model = build_initial(SPEC, 1)
    load_weights(model, read_weights(path), str(path))
    assert all(torch.equal(leaf, weights[key]) for key, leaf in model.tree().items())
    load_weights(build_blank(SPEC), read_weights(path), str(path))
    assert len(digest_weights(path)) == 64


def test_names_and_shapes_that_differ_are_listed():
    weights = stored()
    weights["head.weight"] = weights.pop("0.weight")
    weights["9.weight"] = torch.zeros(10, 147)
    with pytest.raises(ConfigError, match=naming("w.pt", "0.weight", "head.weight", "10x147", "62x147")):
        load_weights(build_blank(SPEC), weights, "w.pt")


def test_a_head_of_another_size_keeps_its_first_weights_if_the_plan_says_so():
    weights, model = stored(), build_initial(SPEC, 1)
    weights |= {"9.weight": torch.zeros(10, 147), "9.bias": torch.zeros(10), "aux.bias": torch.zeros(2)}
    before = model.tree()["9.weight"].clone()
    load_weights(model, weights, "w.pt", ("9", "aux.*"))
    assert torch.equal(model.tree()["9.weight"], before)
    assert torch.equal(model.tree()["0.weight"], weights["0.weight"])
    with pytest.raises(ConfigError, match=naming("model.weights_skip", "classifier")):
        load_weights(model, weights, "w.pt", ("classifier",))


def test_tied_weights_may_have_all_their_names_and_counters_may_be_missing():
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[1].weight = layers[0].weight
    load_weights(Model(layers), {name: torch.ones_like(leaf) for name, leaf in layers.state_dict().items()}, "w")
    assert layers[1].weight.eq(1).all()
    weights = {name: leaf for name, leaf in stored().items() if not name.endswith("num_batches_tracked")}
    load_weights(build_initial(SPEC, 1), weights, "w.pt")


def test_what_is_no_state_dict_is_refused(tmp_path):
    """A whole module would be unpickled, which would run its code."""
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    torch.save({"a": 3}, tmp_path / "numbers.pt")
    (tmp_path / "damaged.safetensors").write_bytes(b"x" * 40)
    (tmp_path / "damaged.pt").write_bytes(b"x" * 40)
    for name in ("module.pt", "numbers.pt", "damaged.safetensors", "damaged.pt"):
        with pytest.raises(ConfigError, match=naming(name, "state_dict()")):
            read_weights(tmp_path / name)
    for name in ("absent.pt", "weights.onnx"):
        with pytest.raises(ConfigError, match=naming(name)):
            read_weights(tmp_path / name)
