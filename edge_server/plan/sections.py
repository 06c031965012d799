"""What every section of a plan is, and every choice in one."""

from __future__ import annotations

import msgspec

from shared.protocol.messages import Hyper, Spec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the plan's sections."""


class Chosen(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A registered thing by name; its options stand under `options`."""


class HyperPlan(Hyper, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Local training; on the wire unknown keys are ignored, in a plan they are mistakes."""
