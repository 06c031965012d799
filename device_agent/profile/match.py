"""Match a board to its firmware profile by device-tree, DMI, machine tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from device_agent.profile.schema import Profile
from shared.errors import ConfigError

MODULE = re.compile(r"([ep][0-9]{4})-[0-9]{4}(?=-|$)", re.ASCII)
"""NVIDIA's module numbers; a revision (`-b00`) or a variant (`-super`) may follow."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that identify a board.

    Attributes:
        compatible: Tokens of the device tree, most specific first.
        dmi: Vendor, product and board of a PC.
        machine: Output of `uname -m`.
    """

    compatible: tuple[str, ...] = ()
    dmi: tuple[str, ...] = ()
    machine: str = ""

    def tokens(self) -> tuple[str, ...]:
        """Return all tokens that a profile may match."""
        return tuple(token for token in (*self.compatible_tokens(), *self.dmi, self.machine) if token)

    def compatible_tokens(self) -> tuple[str, ...]:
        """Return the device-tree tokens, each followed by the modules that it names after a carrier.

        A Jetson reports `nvidia,p2597-0000+p3310-1000`: carrier and module. Sensors belong to the module, whose
        carriers are many.
        """
        return tuple(dict.fromkeys(name for token in self.compatible for name in (token, *_name_modules(token))))


def is_match(profile: Profile, facts: Identity) -> bool:
    """True if one of a profile's tokens equals one of the board's."""
    return _rank(profile, facts) is not None


def choose_profile(profiles: Iterable[Profile], facts: Identity) -> Profile | None:
    """Return the matching profile of highest priority, then with the board's most specific token; None without a match.

    Raises:
        ConfigError: Two profiles of equal priority match by the same token.
    """
    ranked = [(rank, profile) for profile in profiles if (rank := _rank(profile, facts)) is not None]
    best = [profile for rank, profile in ranked if rank == min(rank for rank, _ in ranked)]
    if len(best) > 1:
        first, second = sorted(profile.id for profile in best)[:2]
        raise ConfigError(
            f"profiles {first} and {second} both claim this board; name the right one as profile in [board]"
        )
    return best[0] if best else None


def _rank(profile: Profile, facts: Identity) -> tuple[int, int] | None:
    """Return the rank of a matching profile, lowest first; None without a match."""
    match = profile.match
    claimed = (
        *(token in match.compatible for token in facts.compatible_tokens()),
        *(token in match.dmi for token in facts.dmi),
        facts.machine in match.machine,
    )
    return (-match.priority, claimed.index(True)) if any(claimed) else None


def _name_modules(token: str) -> Iterator[str]:
    """Yield the modules after a carrier's name: in full, without revision, and by number alone.

    The number alone covers unlisted variants of a known module, including a module without a carrier.
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
