"""Messages of a rollout: a release is offered to a board, which says what of it lacks, and what became of it.

Nothing of a release is pushed: the board names by their digests the parts, or single tensors, that no release which it
has holds, and fetches these as one payload. What a board serves, it says in a retained message.
"""

from __future__ import annotations

import msgspec

from shared.protocol.bounded import Number, ReleaseName, Version, Word
from shared.protocol.messages import Message, Transfer

MOST_MANIFEST_BYTES = 768 << 10
"""Of an offered release: its offer is one message."""
MOST_LACKING = 1024
"""Parts and tensors that are asked for one by one; a board that lacks more asks for the whole file."""
MOST_MODELS = 32
"""Names that a board serves."""


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a board says of the model of one name.

    Attributes:
        name: What applications call it.
        committed: The version that it serves; 0 for none.
        previous: The version that it would go back to; 0 for none.
        candidate: The version that it is about to take, or took or refused last; 0 for none.
        state: Of that one: see `shared.protocol.update`; empty for none.
        deployment: The rollout that offered it.
        reason: Why it was refused or rolled back.
        figures: How the served one does: `requests`, `errors`, `p95_s`, as far as it is known.
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
    """Device -> server, retained: that this board serves releases, and how it stands with each.

    Attributes:
        instance: That of the process's Status.
        models: One a name; each was written to the board's disk before it was said.
        ahead: Deployment of which all parts are here before it was offered; empty for none.
    """

    device: str
    instance: str = ""
    models: tuple[ModelStatus, ...] = ()
    ahead: str = ""


class Offer(Message, frozen=True, kw_only=True):
    """Server -> device: take this release.

    Attributes:
        attempt: Counted from 1: what a board refused it tries again only where this is larger.
        manifest: As `shared.protocol.inference.release.write_manifest` makes it.
        soak_s: Seconds that the new version is watched before it is committed.
        max_drop: Accuracy that may be lost on the board's own examples.
        max_latency_ms: Longest p95 of one inference; 0 for one and a half times the version before.
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
    """Server -> device: this release will be offered; have its parts here by then, and try nothing out yet.

    Attributes:
        deployment: That of the offer to come.
        manifest: As `shared.protocol.inference.release.write_manifest` makes it.
    """

    deployment: Word
    name: ReleaseName
    version: Version
    manifest: bytes


class Lacks(Message, frozen=True, kw_only=True):
    """Device -> server: what of an offered release is not on the board; answered with Bundle.

    Attributes:
        deployment: That of the offer.
        parts: SHA-256 of whole parts, 32 bytes each.
        tensors: SHA-256 of tensors of the parameters' file, where other releases on the board have the rest of it.
        header: Whether the header of that file lacks, as it does with any of its tensors.
    """

    device: str
    deployment: Word
    parts: tuple[bytes, ...] = ()
    tensors: tuple[bytes, ...] = ()
    header: bool = False


class Bundle(Message, frozen=True, kw_only=True):
    """Server -> device: what lacks as one payload, to be asked for with Want.

    Attributes:
        deployment: That of the offer.
        params: Parts, the header and tensors, one behind the other in the order of the manifest.
        shared: Whether its frames come on the topic common to all devices.
    """

    deployment: Word
    params: Transfer
    shared: bool = False


class Withdraw(Message, frozen=True, kw_only=True):
    """Server -> device: fetch no more of that offer.

    Attributes:
        deployment: That of the offer.
        back: Whether to go back to the version before where this one is served by now.
    """

    deployment: Word
    name: ReleaseName
    version: Version
    back: bool = False
