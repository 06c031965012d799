"""Registry of codecs: builders by wire name."""

from collections.abc import Callable

from shared.codecs.base import Codec
from shared.codecs.chain import chain
from shared.codecs.dense import dense
from shared.codecs.float16 import float16
from shared.codecs.masked import masked
from shared.codecs.quantize import quantize
from shared.codecs.topk import topk
from shared.registry import Registry

CODECS: Registry[Callable[..., Codec]] = Registry(
    "codec",
    "codecs",
    {
        "dense": dense,
        "float16": float16,
        "quantize": quantize,
        "masked": masked,
        "topk": topk,
        "chain": chain,
    },
    product=Codec,
)
