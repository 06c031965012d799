"""Default objective of training: classification by cross-entropy."""

from __future__ import annotations

from shared.objectives.training import build_training_objective

CLASSIFICATION = build_training_objective()
"""Default objective: cross-entropy and accuracy."""
