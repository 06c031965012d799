"""Report digest of a plan with several sites; rounds are edge rounds, named `global.edge`."""

from __future__ import annotations

import msgspec

from edge_server.journal.compared_metric import ACCURACY, ComparedMetric
from edge_server.journal.outcome import RefusedModels
from edge_server.record.amounts import NONE, Amount
from edge_server.report.digest import DigestPart, ValueOrUnset


class SiteDigest(DigestPart, frozen=True, kw_only=True):
    """One site, with `devices` in the plan.

    Attributes:
        accuracy: Of its model when last evaluated; `measured` names the round.
        seconds: Of its rounds, gossip included.
        joules: Of its devices, including estimates charged for unreported tasks.
        share_joules: Its devices' share of the plan's budget; None without one.
        moved_joules: Received from other sites' shares; negative if it gave more.
        gossip_s: Seconds of its gossips, waits for slower sites included.
        transfer_s: Part of them during which models arrived, of each gossip the slowest neighbour's.
        bytes_up, bytes_down: Frames to and from neighbours.
        decided: Rounds that it decided for other sites.
        refused: Messages of peers that were rejected, by reason.
    """

    site: str
    run: str
    devices: int
    outcome: str
    rounds: int
    accuracy: float | None = None
    value: ValueOrUnset = msgspec.UNSET
    measured: str = ""
    seconds: float = 0.0
    joules: Amount = NONE
    share_joules: float | None = None
    moved_joules: float = 0.0
    gossip_s: float = 0.0
    transfer_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    decided: int = 0
    refused: dict[str, int] = msgspec.field(default_factory=dict)
    refused_models: list[RefusedModels] = msgspec.field(default_factory=list)


class MixingDigest(msgspec.Struct, frozen=True, kw_only=True):
    """End of one global round.

    Attributes:
        round: Its last edge round; `named` in the form `global.edge`.
        accuracy: Of each evaluated site's model after mixing; or its value of the compared metric of the run.
        mean: Over these sites; `of` is their number.
        before, after: Root of the sum over sites of N_i |y_i - mean|^2, before and after mixing, within some percent;
            None unless the journals of all sites are known.
        moved: Distance that the mean over devices moved, with the same limits.
        seconds: Gossip time by site.
        off: Edges that were off, as `one - other`.
        spent_s: Cumulative seconds by site; `whole_s` sums the slowest site's over global rounds.
        spent_joules: Cumulative joules by site; `whole_joules` of all.
        allowed_s, allowed_joules: The plan's budgets at this point if all global rounds are alike.
    """

    round: int
    named: str
    accuracy: dict[str, float] = {}
    mean: float | None = None
    of: int = 0
    before: float | None = None
    after: float | None = None
    moved: float | None = None
    seconds: dict[str, float] = {}
    off: list[str] = []
    spent_s: dict[str, float] = {}
    whole_s: float | None = None
    spent_joules: dict[str, Amount] = {}
    whole_joules: Amount = NONE
    allowed_s: float | None = None
    allowed_joules: float | None = None


class EdgeDigest(msgspec.Struct, frozen=True, kw_only=True):
    """One edge of the graph: gossips over it (`on`) and without it (`off`), according to the available journals.

    Attributes:
        causes: Reasons for being off, from either end.
        rounds: Rounds in which it was off; `unlike`: in which only one end had it on.
        bytes: Both ways, as received; as sent where the other journal is missing.
    """

    one: str
    other: str
    on: int = 0
    off: int = 0
    causes: dict[str, int] = {}
    rounds: list[str] = []
    unlike: list[str] = []
    bytes: int = 0


class Coordinating(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive rounds, `first` to `last`, that one site decided in a term for the same sites.

    Attributes:
        cause: Cause of its term in one word; empty for the first.
    """

    coordinator: str
    term: int
    sites: list[str]
    first: str
    last: str
    rounds: int
    cause: str = ""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Range of a value that the devices of a site were assigned in a round."""

    round: int
    site: str
    least: float
    median: float
    most: float


class SitesDigest(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one plan at its sites.

    Attributes:
        name: Common prefix of the runs' names, or the plan's name.
        live: Whether its seconds are of a wall clock.
        edge_rounds: Per global round; `rounds` are the edge rounds that the plan asks for.
        zeta: Factor by which mixing shrinks disagreement at least while all edges are on.
        missing: Sites without a run in the report.
        time_s, joules: Budgets of the plan.
        given: Assigned values by name: `steps` is rho, `sent` is theta.
    """

    name: str
    live: bool
    plan: str
    compared: ComparedMetric | msgspec.UnsetType = msgspec.UNSET
    graph: str
    edge_rounds: int
    rounds: int
    zeta: float
    missing: list[str] = []
    time_s: float | None = None
    joules: float | None = None
    sites: list[SiteDigest]
    mixings: list[MixingDigest]
    edges: list[EdgeDigest]
    coordinated: list[Coordinating]
    given: dict[str, list[Spread]]

    @property
    def metric(self) -> ComparedMetric:
        """The metric by which models are compared."""
        return self.compared or ACCURACY
