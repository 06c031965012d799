"""State of a restarted server: as without the restart, and unchanged by ten later saves, for every method.

What a method does not send stays in the state from round to round: counters of BatchNorm, the server's part of a split
network, a teacher, masks. It was lost when a state was a view of a checkpoint's file, which later saves overwrite.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from edge_server.journal.checkpoints import SqliteStore
from edge_server.journal.records import AnyRecord, RoundClosed, closed_rounds
from edge_server.plan.plan import Plan
from edge_server.rounds.check_plan import load
from shared.algorithms import ALGORITHMS
from shared.algorithms.base import Algorithm
from shared.protocol.messages import Spec
from shared.registry import build
from shared.tensors.tree import State, tensor_bytes
from tests.edge_server.fleets import RUN, Network, Site, Stopping
from tests.edge_server.harness import write_plan
from tests.test_semisupervised_system import METHODS, write_pictures

NAMES = ("a", "b")
ROUNDS, CUT_AFTER, SAVES = 4, 2, 10
SEEN = (("loaded", 2), ("saved", 3), ("saved", 4))
PERSONAL = "personal_steps = 1, global_steps = 1"
OPTIONS = METHODS | {
    "semisfl_fixed": METHODS["semisfl"],
    "fedsl": "cut = 2, sparsity = 0.3",
    "fedmp": "",
    "pruned_personalization": PERSONAL,
    "pruned_personalization_fedsim": PERSONAL,
    "pruning_only": PERSONAL,
    "fedalt": PERSONAL,
    "fedsim": PERSONAL,
    "hcef": "local_steps = 2",
}


def make_plan(folder: Path, method: str, algorithm: Algorithm) -> Plan:
    """Return a plan of two devices with a small network: BatchNorm's counters, and names such as 10 before 3."""
    write_pictures(folder, side=32, train=20)
    picture = 'source = "npz"\npath = "pictures.npz"'
    labelled = {} if algorithm.server is None else {"server_data": f"{picture}\ndrawn = {{ per_class = 1 }}"}
    path = write_plan(
        folder,
        rounds=ROUNDS,
        algorithm=f'name = "{method}"\noptions = {{ {OPTIONS.get(method, "")} }}',
        model='name = "vgg13"\noptions = { width = 0.04, channels = 1 }',
        hyper="batch_size = 10\nlearning_rate = 0.01",
        cohort="min_devices = 2",
        round="deadline_s = 1000.0\nstep_deadline_s = 300.0\nmost_norm = 0.0",
        evaluation="every = 0\nstatistics_batches = 0",
        data=picture if algorithm.reads_labels else f'{picture}\nlabels = "none"',
        partition='kind = "even"',
        more="".join(f'[[device]]\nname = "{name}"\n' for name in NAMES),
        **labelled,
    )
    return load(path, folder)


class Watched(Stopping):
    """A store that checks that nobody changes a state after it was saved or loaded: no file, and nobody who has it."""

    def __init__(self, folder: Path, at: Callable[[object], bool] = lambda _written: False) -> None:
        super().__init__(folder, at)
        self.states = list[tuple[str, State, dict[str, bytes]]]()

    def save(self, number: int, state: State) -> None:
        """Keep a state; perhaps it was the last."""
        self.states.append((f"saved after round {number}", state, content(state)))
        super().save(number, state)

    def load(self, number: int) -> State:
        """Return a state that was kept."""
        state = super().load(number)
        self.states.append((f"loaded after round {number}", state, content(state)))
        return state

    def require_unchanged(self) -> None:
        """Compare every state with what it was when it was saved or loaded."""
        for what, state, before in self.states:
            after = content(state)
            assert [key for key in before if before[key] != after[key]] == [], what


def content(state: State) -> dict[str, bytes]:
    """Return every leaf's bytes."""
    return {key: bytes(tensor_bytes(leaf)) for key, leaf in sorted(state.tree.items())}


@pytest.mark.parametrize("method", sorted(name for name, builder in ALGORITHMS.items() if not builder().program))
def test_a_restart_and_ten_saves_change_no_leaf(tmp_path, method):
    """Neither of the state that was loaded, nor of the one that the run ends with."""
    algorithm = build(ALGORITHMS, Spec(name=method), "algorithm")
    expected, _ = Site(Network(), make_plan(tmp_path, method, algorithm), tmp_path / "whole").play()
    here = Site(Network(), make_plan(tmp_path, method, algorithm), tmp_path)
    store = list[Watched]()

    async def play() -> tuple[State, list[AnyRecord]]:
        async with here.devices(*NAMES):
            await here.serve_until(lambda written: isinstance(written, RoundClosed) and written.round == CUT_AFTER)
            store.append(Watched(tmp_path / RUN))
            return await here.serve(store[0])

    state, records = here.network.run(play())
    assert [one.outcome for one in closed_rounds(records)] == ["aggregated"] * ROUNDS
    assert [what for what, _, _ in store[0].states] == [f"{what} after round {n}" for what, n in SEEN]
    assert content(state) == content(expected)
    assert state.facts == expected.facts
    with closing(SqliteStore(tmp_path / RUN, durable=False)) as later:
        for number in range(ROUNDS + 1, ROUNDS + 1 + SAVES):
            later.save(number, State({key: torch.zeros_like(leaf) for key, leaf in state.tree.items()}, state.facts))
    store[0].require_unchanged()
