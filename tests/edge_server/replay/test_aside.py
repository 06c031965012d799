"""What a replay has in memory goes with it; where it was killed, with the next one."""

from __future__ import annotations

import signal
import subprocess  # noqa: TID251 - a process that is killed
import sys

from edge_server.replay.temporary_folder import folder_in, sweep

HOLD = """
import sys
from pathlib import Path
from edge_server.replay.temporary_folder import folder_in
with folder_in(Path(sys.argv[1])) as place:
    print(place, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_has_left_is_removed_and_nothing_that_lives(tmp_path):
    """Two processes have folders, one is killed: the next one removes just that; what is not ours stays."""
    (tmp_path / "fieldfleet-1-other").mkdir()
    processes = [
        subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
        for _ in range(2)
    ]
    places = [process.stdout.readline().decode().strip() for process in processes]
    processes[0].send_signal(signal.SIGKILL)
    processes[0].wait()
    with folder_in(tmp_path) as own:
        left = {f"{path}" for path in tmp_path.iterdir()}
        assert left == {places[1], f"{own}", f"{tmp_path / 'fieldfleet-1-other'}"}
    for process in processes:
        process.communicate()
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["fieldfleet-1-other"]
