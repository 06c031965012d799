"""What the runs of a plan's sites came to together; rounds are edge rounds, named `global.edge`."""

from __future__ import annotations

import msgspec

from edge_server.journal.outcome import RefusedModels
from edge_server.report.digest import NONE, Amount


class SiteDigest(msgspec.Struct, frozen=True, kw_only=True):
    """One site.

    Attributes:
        site: By the plan's name of it.
        devices: That the plan gives it.
        accuracy: Of its model, where it was measured last; `measured` is the round.
        seconds: Of its rounds, gossip included.
        joules: Of its devices, with those that are charged since nobody told them.
        share_joules: Its devices' share of the plan's budget; None without one.
        moved_joules: What came to it of others' shares; below zero where it gave more.
        gossip_s: Seconds of its gossips, waits for slower sites included.
        transfer_s: Of them, those in which models came, of each gossip the slowest neighbour's.
        bytes_up, bytes_down: Of frames to and from neighbours.
        decided: Rounds that it decided for others.
        refused: What peers said that was of no use, by reason.
        refused_models: Neighbours whose models it refused.
    """

    site: str
    run: str
    devices: int
    outcome: str
    rounds: int
    accuracy: float | None = None
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
    refused: dict[str, int] = {}
    refused_models: list[RefusedModels] = []


class MixingDigest(msgspec.Struct, frozen=True, kw_only=True):
    """One global round's end.

    Attributes:
        round: Its last edge round; `named` as people are shown it.
        accuracy: Of the model of each site that was measured, once mixed.
        mean: Of these, over the sites; `of` is how many.
        before, after: Root of the sum over sites of N_i |y_i - mean|^2, before and after mixing, within some percent;
            None where not all sites' journals tell.
        moved: How far the mean over devices moved in it, likewise.
        seconds: That gossip took each site.
        off: Edges that were off, as `one - other`.
        spent_s: Seconds of the run by then, of each site; `whole_s` as the sum over global rounds of the slowest's.
        spent_joules: Joules of the devices by then, of each site; `whole_joules` of all.
        allowed_s, allowed_joules: What the plan's budgets are by then, if all global rounds are alike.
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
    """One edge of the graph.

    Attributes:
        on: Gossips with it, by the journals that are here; `off`: those without.
        causes: Why it was off, by either end.
        rounds: In which it was off.
        unlike: Rounds in which it was on at one end alone.
        bytes: Both ways, as they came; what went where the other journal is not here.
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
    """Rounds in a row that the same site decided for the same sites.

    Attributes:
        coordinator: Who; of `term`.
        sites: For whom, as their runs have it.
        first, last: Rounds; `rounds` is how many.
        cause: Why its term began, one word; empty of the first.
    """

    coordinator: str
    term: int
    sites: list[str]
    first: str
    last: str
    rounds: int
    cause: str = ""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """What the devices of a site were given of one thing in a round."""

    round: int
    site: str
    least: float
    median: float
    most: float


class SitesDigest(msgspec.Struct, frozen=True, kw_only=True):
    """The runs of one plan at its sites.

    Attributes:
        name: What their names begin with, or that of the plan.
        live: Whether its seconds are of a wall clock.
        edge_rounds: Of a global round.
        rounds: Edge rounds that the plan asks for.
        zeta: By which mixing shrinks disagreement at the least where all edges are on.
        missing: Sites whose runs are not here.
        time_s, joules: Budgets of the plan.
        given: By name: `steps` is rho, `sent` is theta.
    """

    name: str
    live: bool
    plan: str
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
