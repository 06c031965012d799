"""Digest of a run's pretrained weights: recorded at its start, compared at resumption."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edge_server.journal.records import RunOpened
from shared.errors import ConfigError
from shared.tensors.weights_file import KEY, digest_weights

SHOWN_DIGITS = 12


def check_weights(begun: RunOpened | None, new: RunOpened) -> RunOpened:
    """Return a run's first record: that of a run to resume if its weights are still the same, or a new one with theirs.

    Raises:
        ConfigError: As `require_same_weights`.
    """
    if begun is None:
        return with_weights(new)
    require_same_weights(begun)
    return begun


def with_weights(begun: RunOpened) -> RunOpened:
    """Return a new run's record with the digest of its file of pretrained weights.

    Raises:
        ConfigError: The file cannot be read.
    """
    path = begun.plan.model.weights
    return msgspec.structs.replace(begun, weights=digest_weights(Path(path))) if path else begun


def require_same_weights(begun: RunOpened) -> None:
    """Refuse to resume a run with another file of weights than it began with.

    Raises:
        ConfigError: The file cannot be read, or its digest differs.
    """
    plan = begun.plan
    if not plan.model.weights:
        return
    digest = digest_weights(Path(plan.model.weights))
    before = (begun.weights or "unknown")[:SHOWN_DIGITS]
    if digest != begun.weights:
        raise ConfigError(
            f"{KEY}: run {begun.run!r} began with another content of {plan.model.weights}: its SHA-256 was {before}, "
            f"and is {digest[:SHOWN_DIGITS]}; restore that file, or name another run"
        )
