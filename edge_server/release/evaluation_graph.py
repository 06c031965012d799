"""ONNX evaluation graph of a run, exported once when the run starts or resumes."""

from __future__ import annotations

from edge_server.plan.plan import Plan
from edge_server.release.graph import (
    INPUT,
    OPSET,
    OUTPUT,
    ByteRange,
    reference_weights,
    require_parity,
    trace_graph,
)
from edge_server.release.run_model import load_test_examples, make_probes
from shared.errors import ConfigError
from shared.models.build import build_initial
from shared.protocol import evaluation_graph as graphs
from shared.protocol.evaluation_graph import EvaluationGraph
from shared.protocol.inference.release import PARAMETERS
from shared.runtime.extras import install_command

KEY = "evaluation.runtime"


def make_evaluation_graph(plan: Plan) -> bytes:
    """Export and encode the evaluation graph; empty if the plan evaluates in the trainer.

    The bytes depend on the network's architecture only.

    Raises:
        ConfigError: The network cannot be exported, its input shape is unknown, or a required package is not installed.
    """
    if plan.evaluation.runtime != "onnx":
        return b""
    built, what = build_initial(plan.model, plan.seed), f"{KEY}: model {plan.model.name!r}"
    examples = load_test_examples(plan)
    example = built.example if examples is None else tuple(examples.inputs.shape[1:])
    if not example:
        raise ConfigError(f"{what} declares no input shape; add [data], or remove {KEY}")
    layers = built.layers.eval()
    try:
        probes = make_probes(layers, example, what)
        traced = trace_graph(layers, example, (INPUT, OUTPUT), what)
        tree = {name: leaf for name, leaf in built.tree().items() if name in traced.parameters}
        data = reference_weights(traced, {name: ByteRange(PARAMETERS, 0, leaf.nbytes) for name, leaf in tree.items()})
        require_parity(data, probes, what, tree)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{KEY} needs {error.name}: {install_command('release')}") from error
    return graphs.encode(
        EvaluationGraph(input=traced.input, output=traced.output, parameters=traced.parameters, opset=OPSET, onnx=data)
    )
