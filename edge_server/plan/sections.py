"""Base classes of plan sections: strict struct, and a named choice with options."""

from __future__ import annotations

import msgspec

from shared.protocol.messages import Spec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the plan's sections."""


class Chosen(Spec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A choice by name.

    Attributes:
        name: One of the names that have a section of options below.
        options: Options of that choice.
    """
