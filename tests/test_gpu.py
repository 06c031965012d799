"""Run on a GPU, near the CPU's results and reproducible; skipped elsewhere."""

from __future__ import annotations

import pytest
import torch

from edge_server.journal.records import UpdateAccepted, closed_rounds
from shared.algorithms.fedavg import descend_batches
from shared.errors import ConfigError, TaskFailed
from shared.models.build import build_initial
from shared.objectives.classification import CLASSIFICATION
from shared.protocol.messages import Hyper, Spec, StepOptions
from shared.tensors.mixed_precision import computes_in
from shared.tensors.placement import choose_device, describe, explain_exhausted_memory
from shared.tensors.tree import CPU
from tests.edge_server.textbook import require_equal
from tests.naming import naming
from tests.test_trainer_device import METHODS, run

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason=f"torch {torch.__version__} reaches no GPU here")
RANKED = ("fedselect", "hermes", "pruned_personalization", "fedsl")
"""They choose weights or neurons, of which rounding may choose others; `make bench NAME=gpu` tells how far apart."""


@pytest.fixture
def gpu():
    """Return the GPU, and have torch as it was afterwards."""
    yield choose_device("cuda")
    torch.use_deterministic_algorithms(mode=False)


@needs_gpu
@pytest.mark.parametrize("name", METHODS)
def test_a_run_on_a_gpu_is_the_cpu_s_but_for_rounding_and_again_the_same(tmp_path, gpu, name):
    """Two rounds; a second run of the same gives every bit again."""
    state, records = run(tmp_path / "gpu", name, gpu)
    again, _ = run(tmp_path / "again", name, gpu)
    require_equal(again.tree, state.tree)
    assert [one.outcome for one in closed_rounds(records)] == ["aggregated", "aggregated"]
    told = {one.update.trained_on for one in records if isinstance(one, UpdateAccepted)}
    assert told == {describe(gpu)}
    if name not in RANKED:
        here, _ = run(tmp_path / "cpu", name, CPU)
        for key, leaf in here.tree.items():
            torch.testing.assert_close(state.tree[key], leaf, atol=1e-3, rtol=1e-2)


@needs_gpu
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_reduced_precision_trains_as_32_bits_do_but_for_rounding(gpu, name):
    """Thirty steps of AdamW: parameters of 32 bits, and a loss as low."""
    if not computes_in(name, gpu):
        pytest.skip(f"this GPU does not compute in {name}")
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 32, generator=generator)
    batch = inputs.to(gpu), (inputs[:, :4].argmax(1)).to(gpu)
    losses = {}
    for precision in ("float32", name):
        layers = build_initial(Spec(name="mlp", options={"features": 32, "hidden": 64, "classes": 4}), 3).layers.to(gpu)
        step = StepOptions(optimizer="adamw", precision=precision)
        hyper = Hyper(learning_rate=0.01, step_options=step)
        weights = list(layers.named_parameters())
        losses[precision] = descend_batches(layers, weights, [batch] * 30, hyper, CLASSIFICATION)
        assert {weight.dtype for weight in layers.parameters()} == {torch.float32}
    assert losses[name] != losses["float32"]
    assert losses[name] == pytest.approx(losses["float32"], rel=0.05)


@needs_gpu
def test_memory_that_is_not_there_is_one_failed_task(gpu):
    """More than any GPU has; afterwards it computes as before."""
    with pytest.raises(TaskFailed, match=naming("cuda")), explain_exhausted_memory(gpu, lambda: None):
        torch.empty(1 << 50, dtype=torch.uint8, device=gpu)
    assert torch.ones(3, device=gpu).sum().item() == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch reaches a GPU here")
def test_a_gpu_that_is_asked_for_and_not_there_is_one_line_with_its_remedy():
    """And `auto` is the CPU then."""
    with pytest.raises(ConfigError, match=naming("trainer.device", "'cuda'", "auto")) as raised:
        choose_device("cuda")
    assert "\n" not in str(raised.value)
    assert choose_device("auto") == choose_device("cpu") == CPU
