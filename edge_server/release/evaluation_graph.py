"""The graph that devices evaluate a run's rounds by, with ONNX Runtime: made once, when the run begins or goes on."""

from __future__ import annotations

from edge_server.plan.plan import Plan
from edge_server.release.graph import (
    INPUT,
    OPSET,
    OUTPUT,
    ByteRange,
    require_parity,
    trace_graph,
    without_weights,
)
from edge_server.release.run_model import make_probes, test_examples
from shared.errors import ConfigError
from shared.models.build import build_initial
from shared.protocol import evaluation_graph as graphs
from shared.protocol.evaluation_graph import EvaluationGraph
from shared.protocol.inference.release import PARAMETERS
from shared.runtime.extras import install_command

KEY = "evaluation.runtime"


def make_evaluation_graph(plan: Plan) -> bytes:
    """Return the graph as it travels, empty where the plan has trainers evaluate; one network has one, byte for byte.

    Raises:
        ConfigError: The network cannot be exported, or nobody says what examples it is made for; or what that takes is
            not installed.
    """
    if plan.evaluation.runtime != "onnx":
        return b""
    built, what = build_initial(plan.model, plan.seed), f"{KEY}: model {plan.model.name!r}"
    examples = test_examples(plan)
    example = built.example if examples is None else tuple(examples.inputs.shape[1:])
    if not example:
        raise ConfigError(f"{what} does not say what examples it is made for; add [data], or take {KEY} out")
    layers = built.layers.eval()
    try:
        probes = make_probes(layers, example, what)
        traced = trace_graph(layers, example, (INPUT, OUTPUT), what)
        tree = {name: leaf for name, leaf in built.tree().items() if name in traced.parameters}
        data = without_weights(traced, {name: ByteRange(PARAMETERS, 0, leaf.nbytes) for name, leaf in tree.items()})
        require_parity(data, probes, what, tree)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{KEY} needs {error.name}: {install_command('release')}") from error
    return graphs.encode(
        EvaluationGraph(input=traced.input, output=traced.output, parameters=traced.parameters, opset=OPSET, onnx=data)
    )
