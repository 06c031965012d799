"""Ask every probe: a board's whole state in one value."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from device_agent.probes.base import Found, Probe, absent
from device_agent.profile.schema import Profile
from shared.errors import NoData
from shared.runtime.clock import Clock

log = logging.getLogger(__name__)


def sense(root: Path, profile: Profile, probes: Mapping[str, Probe], clock: Clock) -> Found:
    """Return what all probes found; one that fails costs its own figures and no others, and says why."""
    all_found = Found()
    for name, probe in probes.items():
        try:
            found = probe(root, profile, clock())
        except NoData as error:
            log.debug("probe %s: %s", name, error)
            found = Found(absent={name: absent(error)})
        all_found = Found(
            readings=all_found.readings | found.readings,
            absent=all_found.absent | found.absent,
            facts=all_found.facts | found.facts,
        )
    return all_found
