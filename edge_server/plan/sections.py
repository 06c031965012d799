"""Base classes of plan sections: strict struct, and a named choice with options."""

from __future__ import annotations

import msgspec

from shared.protocol.messages import Spec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of the plan's tables; unknown keys are errors."""


class Chosen(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Named choice with options.

    Attributes:
        name: A name that has a section of options below.
        options: Options of the named choice.
    """
