"""Rollout messages: offer, missing parts, bundle, model status.

Nothing of a release is pushed: the board requests by digest the parts, or single tensors, that none of its releases
has, and fetches them as one payload. It reports what it serves in a retained message.
"""

from __future__ import annotations

import msgspec

from shared.protocol.bounded import Number, ReleaseName, Version, Word
from shared.protocol.messages import Message, Transfer

MOST_MANIFEST_BYTES = 768 << 10
"""Limit of a manifest in an offer, which is one message."""
MOST_LACKING = 1024
"""Most parts and tensors requested one by one; a board that lacks more requests the whole file."""
MOST_MODELS = 32
"""Most models that a board serves."""


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A board's status of the model of one name.

    Attributes:
        name: Name that applications use.
        committed: The version that it serves; 0 for none.
        previous: The version for a rollback; 0 for none.
        candidate: The version in progress, or accepted or refused last; 0 for none.
        state: Phase of the candidate, see `shared.protocol.update`; empty for none.
        deployment: The rollout that offered it.
        reason: Cause of a refusal or rollback.
        figures: Figures of the served version, as far as known: `requests`, `errors`, `p95_s`.
    """

    name: str
    committed: int = 0
    previous: int = 0
    candidate: int = 0
    state: str = ""
    deployment: str = ""
    attempt: int = 0
    reason: str = ""
    figures: dict[str, float] = {}


class Releases(Message, frozen=True, kw_only=True):
    """Device -> server, retained: status of all releases on this board.

    Attributes:
        instance: Process id as in its Status.
        models: One entry per name; written to the board's disk before it is sent.
        ahead: Deployment whose parts were all fetched before its offer; empty for none.
    """

    device: str
    instance: str = ""
    models: tuple[ModelStatus, ...] = ()
    ahead: str = ""


class Offer(Message, frozen=True, kw_only=True):
    """Server -> device: install this release.

    Attributes:
        attempt: Counted from 1: a board retries a refused release only if this is larger.
        manifest: JSON, as `shared.protocol.inference.release.write_manifest` encodes it.
        soak_s: Duration of the new version's trial in seconds.
        max_drop: Allowed loss of accuracy on the board's own examples.
        max_latency_ms: Longest p95 of one inference; 0 for one and a half times the previous version's.
    """

    deployment: Word
    name: ReleaseName
    version: Version
    attempt: Number = 1
    manifest: bytes
    soak_s: float
    max_drop: float = 0.02
    max_latency_ms: float = 0.0


class Ahead(Message, frozen=True, kw_only=True):
    """Server -> device: this release will be offered; fetch its parts, but do not try it yet.

    Attributes:
        deployment: Deployment of the future offer.
        manifest: JSON, as `shared.protocol.inference.release.write_manifest` encodes it.
    """

    deployment: Word
    name: ReleaseName
    version: Version
    manifest: bytes


class Lacks(Message, frozen=True, kw_only=True):
    """Device -> server: missing parts of an offered release; answered with Bundle.

    Attributes:
        deployment: Deployment of the offer.
        parts: SHA-256 of whole parts, 32 bytes each.
        tensors: SHA-256 of tensors of the parameters' file, if other releases on the board have its remaining tensors.
        header: Whether the header of that file is missing; always set together with tensors.
    """

    device: str
    deployment: Word
    parts: tuple[bytes, ...] = ()
    tensors: tuple[bytes, ...] = ()
    header: bool = False


class Bundle(Message, frozen=True, kw_only=True):
    """Server -> device: the missing parts as one payload, to be requested with Want.

    Attributes:
        deployment: Deployment of the offer.
        params: Parts, the header and tensors, concatenated in the order of the manifest.
        shared: Whether its frames come on the topic common to all devices.
    """

    deployment: Word
    params: Transfer
    shared: bool = False


class Withdraw(Message, frozen=True, kw_only=True):
    """Server -> device: stop fetching that offer.

    Attributes:
        deployment: Deployment of the offer.
        back: Whether to roll back to the previous version if this one is served already.
    """

    deployment: Word
    name: ReleaseName
    version: Version
    back: bool = False
