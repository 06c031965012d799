"""Lines below a run's table."""

from __future__ import annotations

from edge_server.journal.records import UpdateAccepted
from edge_server.trial.tables import gpu_lines
from shared.protocol.messages import Update
from tests.naming import names_all


def accepted(number: int, device: str, trained_on: str = "cpu") -> UpdateAccepted:
    update = Update(run="run", round=number, device=device, params=None, trained_on=trained_on)
    return UpdateAccepted(round=number, device=device, update=update, bytes_up=1)


def test_it_is_said_which_devices_trained_on_a_gpu_the_last_time():
    """Nothing is said of a fleet of CPUs, nor of a board whose GPU was taken away since."""
    orin, nano = "cuda (Orin)", "cuda (NVIDIA Tegra X1)"
    records = [accepted(1, "a", orin), accepted(1, "b"), accepted(1, "c", orin), accepted(1, "d", nano)]
    on_nano, on_orin = gpu_lines(records)
    assert names_all(on_nano, nano, "d")
    assert names_all(on_orin, orin, "a, c")
    later = [*records, accepted(2, "a"), accepted(2, "d", orin)]
    [line] = gpu_lines(later)
    assert names_all(line, orin, "c, d")
    assert gpu_lines([accepted(1, "b")]) == []
