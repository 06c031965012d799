"""Source `none`: no examples, for a method whose program reads its own."""

from __future__ import annotations

from shared.data.sources.arrays import ReadPart
from shared.data.spec import Data
from shared.errors import ConfigError


def read_part(_spec: Data, _most: int | None = None) -> ReadPart:
    """Refuse to read.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError('data.source = "none" has no examples; name the source of the examples in [data]')
