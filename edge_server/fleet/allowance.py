"""How much of a run's journal a device may cause: a bucket of words for each, filled slowly."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

BURST, WORDS_PER_S = 600.0, 0.5
"""Records that a device may cause at once, and for ever: 10 MB a day, whatever it says."""


@dataclass
class Allowance:
    """Buckets by device; who says too much is told of once, and is then heard in part."""

    _left: dict[str, tuple[float, float]] = field(default_factory=dict)
    _talkative: set[str] = field(default_factory=set)

    def take(self, device: str, at: float) -> bool:
        """Tell whether a device may cause a record at this moment; if so, it is counted."""
        left, since = self._left.get(device, (BURST, at))
        left = min(BURST, left + WORDS_PER_S * (at - since))
        may = left >= 1
        if not may and device not in self._talkative:
            self._talkative.add(device)
            log.warning("device %s says more than a run's journal takes; some of it is left out", device)
        self._left[device] = (left - may, at)
        return may
