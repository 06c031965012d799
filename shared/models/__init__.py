"""Every model's builder by its wire name."""

from collections.abc import Callable, Mapping

from shared.models.base import Model
from shared.models.cnn import cnn
from shared.models.mlp import mlp

MODELS: Mapping[str, Callable[..., Model]] = {"cnn": cnn, "mlp": mlp}
