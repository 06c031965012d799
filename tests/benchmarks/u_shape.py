"""Link traffic of a round of split VGG-19, by cut, replayed at 200 m.

Zhang, Ni, Wang count a mini-batch as a round and average every I of them, so that a round bears a share of 1/I of the
model's way. Deeper cuts exchange fewer activations and larger models: their sum falls, then rises. The real payloads
travel: the network is of full size, its batch has 64 examples.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from measure import Figure

from edge_server.journal.costs import costs_by_round
from edge_server.replay.run import replay_plan
from edge_server.rounds.check_plan import load

PERIOD, BATCH, QUICK_BATCH = 5, 64, 4
EXPECTED_MS = {2: (1196, 9), 4: (598, 59), 8: (299, 531), 12: (149, 2415), 16: (37, 4568)}
"""By cut: bytes over the rates of the path, 46.8 Mbit/s up and 70.1 down; no frames, no requests."""
SLACK, HEADERS_MS = 1.05, 5.0
"""Of a link's seconds at the most: frames' headers, requests, and the first windows, which are small."""
PLAN = """
name = "u-shape"
rounds = 1

[algorithm]
name = "fedsl"
options = {{ cut = {cut}, period = {period}, drop = 0.0, sparsity = 0.0, bits = 32 }}

[model]
name = "vgg19"

[hyper]
batch_size = {batch}
learning_rate = 0.001

[evaluation]
every = 0

[data]
source = "npz"
path = "noise.npz"

[[device]]
name = "board"
compute = {{ kind = "given", seconds = 0.0 }}
link = {{ kind = "wireless", bandwidth_hz = 5e6, distance_m = 200.0, tx_dbm = 23.0, server_dbm = 37.0 }}
"""


def of(folder: Path, cut: int, batch: int) -> tuple[float, float]:
    """Return the milliseconds of a round's activations and gradients, and of its share of the model's ways."""
    (folder / "plan.toml").write_text(PLAN.format(cut=cut, period=PERIOD, batch=batch))
    _, records = replay_plan(load(folder / "plan.toml", folder), folder / f"run-{cut}")
    [cost] = costs_by_round(records)[1].values()
    assert cost.exchange_s is not None
    assert cost.download_s is not None
    assert cost.upload_s is not None
    return 1000 * cost.exchange_s / PERIOD, 1000 * (cost.download_s + cost.upload_s) / PERIOD


def write_noise(folder: Path, batch: int) -> None:
    """Write pictures of noise: what moves does not depend on what they show."""
    drawn = np.random.default_rng(0)
    shapes = {"train": PERIOD * batch, "test": 8}
    arrays = {f"x_{name}": drawn.integers(0, 256, (count, 32, 32, 3), np.uint8) for name, count in shapes.items()}
    labels = {f"y_{name}": drawn.integers(0, 10, count, np.uint8) for name, count in shapes.items()}
    np.savez(folder / "noise.npz", **arrays, **labels)


def run(*, quick: bool = False) -> list[Figure]:
    """Replay a round at every cut; quickly at one, of small batches, so that activations take less than is told."""
    cuts, batch = (list(EXPECTED_MS)[-1:], QUICK_BATCH) if quick else (EXPECTED_MS, BATCH)
    with tempfile.TemporaryDirectory(prefix="fieldfleet-") as place:
        folder = Path(place)
        write_noise(folder, batch)
        found = {cut: of(folder, cut, batch) for cut in cuts}
    figures = []
    for cut, parts in found.items():
        for name, value, expected in zip(("activations", "model"), parts, EXPECTED_MS[cut], strict=True):
            most = SLACK * expected + HEADERS_MS
            figures.append(Figure(f"u-shape, cut {cut}: {name}", value, "ms", f"<= {most:.0f}"))
        figures.append(Figure(f"u-shape, cut {cut}: both", sum(parts), "ms"))
    return figures
