"""Build a plan's network and algorithm, with pretrained weights, frozen layers and adapters."""

from __future__ import annotations

from pathlib import Path

from edge_server.plan.plan import Plan
from shared.algorithms import ALGORITHMS
from shared.algorithms.adaptation import restrict
from shared.algorithms.base import Algorithm
from shared.models.adaptation import adapt, freeze, frozen_names
from shared.models.base import Model
from shared.models.build import build_blank, build_initial
from shared.models.weights import load_weights
from shared.registry import build
from shared.tensors.weights_file import KEY, read_weights


def plan_algorithm(plan: Plan) -> Algorithm:
    """Build a plan's method, restricted to the leaves that its devices train.

    Raises:
        ConfigError: A name or option is unknown.
    """
    algorithm, adaptation = build(ALGORITHMS, plan.algorithm, "algorithm"), plan.adaptation
    return restrict(algorithm, plan_frozen(plan), adaptation.lora) if adaptation else algorithm


def plan_frozen(plan: Plan) -> frozenset[str]:
    """Return the names of the leaves that devices receive once and do not train."""
    adaptation = plan.adaptation
    return frozen_names(adapt(build_blank(plan.model), adaptation), adaptation) if adaptation else frozenset()


def blank_network(plan: Plan) -> Model:
    """Return a plan's network without storage and without adapters, as it is evaluated."""
    model = build_blank(plan.model)
    return freeze(model, plan_frozen(plan)) if plan.adaptation else model


def blank_trained(plan: Plan) -> Model:
    """Return a plan's network without storage as devices train it."""
    model = build_blank(plan.model)
    return adapt(model, plan.adaptation) if plan.adaptation else model


def initial_network(plan: Plan, draw: str) -> Model:
    """Return a plan's network with its first weights, as devices train it.

    Args:
        draw: Generator of initial weights: see `shared.models.build`.

    Raises:
        ConfigError: The file of weights cannot be read, or does not fit the network.
    """
    model = build_initial(plan.model, plan.seed, draw)
    load_pretrained(plan, model)
    return adapt(model, plan.adaptation, plan.seed) if plan.adaptation else model


def load_pretrained(plan: Plan, model: Model) -> None:
    """Load a plan's file of weights into its network; without storage, only check that they fit.

    Raises:
        ConfigError: The file cannot be read, or does not fit the network.
    """
    if plan.model.weights:
        path = Path(plan.model.weights)
        load_weights(model, read_weights(path), f"{KEY}: {path}", plan.model.weights_skip or ())


def describe_trained(plan: Plan) -> str:
    """Describe the trained share of a plan's network, and the bytes that travel once or in each round."""
    network, frozen = blank_trained(plan), plan_frozen(plan)
    parameters = dict(network.layers.named_parameters())
    trained = sum(leaf.numel() for name, leaf in parameters.items() if name not in frozen)
    once = sum(leaf.nbytes for name, leaf in network.tree().items() if name in frozen)
    each = sum(leaf.nbytes for name, leaf in network.tree().items() if name not in frozen)
    total = sum(leaf.numel() for leaf in parameters.values())
    return (
        f"devices train {trained:,} of {total:,} parameters: {each:,} bytes travel in each direction per round, and "
        f"{once:,} bytes of frozen leaves go to each device once"
    )
