"""Match a board to its firmware profile by device-tree, DMI and machine tokens; pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from device_agent.profile.schema import Profile
from shared.errors import ConfigError

MODULE = re.compile(r"([ep][0-9]{4})-[0-9]{4}(?=-|$)", re.ASCII)
"""How NVIDIA numbers modules; a revision (`-b00`) or a variant (`-super`) may follow."""


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
        return tuple(token for token in (*self.compatible_tokens(), *self.dmi, self.machine) if token)

    def compatible_tokens(self) -> tuple[str, ...]:
        """Return the tokens of the device tree, each with the modules that it names behind a carrier.

        A Jetson says `nvidia,p2597-0000+p3310-1000`: carrier and module. Sensors are the module's, carriers are many.
        """
        return tuple(dict.fromkeys(one for token in self.compatible for one in (token, *_name_modules(token))))


def is_match(profile: Profile, facts: Identity) -> bool:
    """Return whether a profile is for this board: one of its tokens is the board's, letter by letter."""
    return _rank(profile, facts) is not None


def choose_profile(profiles: Iterable[Profile], facts: Identity) -> Profile | None:
    """Return the profile of highest priority that matches, of several the one with the board's most specific token.

    None where none matches.

    Raises:
        ConfigError: Two of the same priority match by the same token.
    """
    ranked = [(rank, one) for one in profiles if (rank := _rank(one, facts)) is not None]
    best = [one for rank, one in ranked if rank == min(rank for rank, _ in ranked)]
    if len(best) > 1:
        one, two = sorted(profile.id for profile in best)[:2]
        raise ConfigError(f"profiles {one} and {two} both claim this board; name the right one as profile in [board]")
    return best[0] if best else None


def _rank(profile: Profile, facts: Identity) -> tuple[int, int] | None:
    """Return the place of a profile among those that match, the least the best; None where it does not match."""
    match = profile.match
    claimed = (
        *(token in match.compatible for token in facts.compatible_tokens()),
        *(token in match.dmi for token in facts.dmi),
        facts.machine in match.machine,
    )
    return (-match.priority, claimed.index(True)) if any(claimed) else None


def _name_modules(token: str) -> Iterator[str]:
    """Yield the modules behind a carrier's name: as they stand, without revision, without number.

    The last is for a number of a known module that nobody listed yet, also of a module that stands alone.
    """
    vendor, _, boards = token.partition(",")
    carrier, *modules = boards.split("+")
    for board in modules:
        if number := MODULE.match(board):
            yield f"{vendor},{board}"
            yield f"{vendor},{number[0]}"
    for board in (*modules, carrier):
        if number := MODULE.match(board):
            yield f"{vendor},{number[1]}"
