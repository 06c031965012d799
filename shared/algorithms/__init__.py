"""Every learning algorithm's builder by its wire name."""

from collections.abc import Callable, Mapping

from shared.algorithms.base import Algorithm
from shared.algorithms.fedavg import fedavg
from shared.algorithms.fedprox import fedprox
from shared.algorithms.fedsl import VARIANTS, fedsl

ALGORITHMS: Mapping[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedsl": fedsl,
    **VARIANTS,
}
