"""Every codec's builder by its wire name."""

from collections.abc import Callable, Mapping

from shared.codecs.base import Codec
from shared.codecs.dense import dense

CODECS: Mapping[str, Callable[..., Codec]] = {"dense": dense}
