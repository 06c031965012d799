"""Match a board to its firmware profile by device-tree, DMI and machine tokens; pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from device_agent.profile.schema import Profile
from shared.errors import ConfigError


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens by which a board identifies itself.

    Attributes:
        compatible: Tokens of its device tree, most specific first.
        dmi: Vendor, product and board of a PC.
        machine: As `uname -m` prints it.
    """

    compatible: tuple[str, ...] = ()
    dmi: tuple[str, ...] = ()
    machine: str = ""

    def tokens(self) -> tuple[str, ...]:
        """Return everything a profile may match by."""
        return tuple(token for token in (*self.compatible, *self.dmi, self.machine) if token)


def is_match(profile: Profile, facts: Identity) -> bool:
    """Return whether a profile is for this board: one of its tokens is the board's, letter by letter."""
    match = profile.match
    return (
        not set(match.compatible).isdisjoint(facts.compatible)
        or not set(match.dmi).isdisjoint(facts.dmi)
        or facts.machine in match.machine
    )


def choose_profile(profiles: Iterable[Profile], facts: Identity) -> Profile | None:
    """Return the profile of highest priority that matches, None where none does.

    Raises:
        ConfigError: Two of the same priority match.
    """
    found = sorted((one for one in profiles if is_match(one, facts)), key=lambda one: one.match.priority)
    if len(found) > 1 and found[-1].match.priority == found[-2].match.priority:
        one, two = sorted(profile.id for profile in found[-2:])
        raise ConfigError(f"profiles {one} and {two} both claim this board; name the right one as profile in [board]")
    return found[-1] if found else None
