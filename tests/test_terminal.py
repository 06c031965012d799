"""Tables of every command on terminals of several widths and in a pipe: no figure is cut."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from random import Random

import pytest

from device_agent.__main__ import main as agent_main
from device_agent.commands.calibrate import print_fit as show_fit
from device_agent.measurement.calibration_file import Calibration, SensorLine
from edge_server.__main__ import main as server_main
from edge_server.cli.chaos import Outcome, total
from edge_server.cli.chaos import show as show_kills
from edge_server.journal.report_history import ReportHistory, StoredReport
from edge_server.trial.chaos.study import KillResult
from edge_server.trial.chaos.verify import Account
from shared.protocol.measurements import Absent
from shared.protocol.messages import Report
from shared.runtime.clock import utc_seconds
from tests.device_agent.sources import report, with_clocks
from tests.edge_server.fleets import VARIANTS, write_study
from tests.edge_server.harness import write_examples, write_plan
from tests.edge_server.processes import folder_of
from tests.machine import on_terminal, require_whole

NAMES = [f"raspberry-pi-{number}" for number in range(8)]
ORIN = Path(__file__).parent / "fixtures" / "boards" / "jetson-orin-nx" / "root"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Return a folder with a run of eight devices whose neurons an optimizer shared out, and their readings."""
    folder = tmp_path_factory.mktemp("site")
    plan = write_plan(
        folder,
        algorithm='name = "random_dropout"',
        model='name = "mlp"\noptions = { features = 8, hidden = 10, classes = 3 }',
        optimizer='name = "clusters"',
        cohort="min_devices = 8",
        evaluation="every = 1\non_device = true",
        data=f"{write_examples(folder, 160)}\nholdout = 0.2",
        partition='kind = "even"',
        more="\n".join(f'[[device]]\nname = "{name}"' for name in NAMES),
    )
    run_server("replay", plan, "--data-dir", folder / "runs", "--data-root", folder, "--workers", 1)
    readings, now = ReportHistory(folder / "runs", 14, 1 << 20), utc_seconds()
    for number, name in enumerate(NAMES):
        readings.write([StoredReport(now - 7300 + number, report(Random(number), 100.0, name))])
    lost = Report(device="gone", at=1.0, absent={"power": Absent(lack="denied", cause="root alone may read it " * 5)})
    readings.write([StoredReport(now, lost)])
    readings.close()
    return folder


def run_server(*words: object) -> None:
    call(server_main, "edge-server", *words)


def run_agent(*words: object) -> None:
    call(agent_main, "device-agent", *words)


def call(main: Callable[[], object], name: str, *words: object) -> None:
    """Run a command line in this process; one that complains is an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0


def piped(command: Callable[[], None], columns: int) -> list[str]:
    """Return the lines that a command writes where nobody looks on."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.setenv("COLUMNS", str(columns))
        command()
    return out.getvalue().splitlines()


SERVER = {
    "runs": ("runs",),
    "show": ("show", "RUN"),
    "explain": ("explain", "RUN", 1),
    "devices": ("devices",),
    "device": ("devices", "raspberry-pi-3", "--plot", "power.total_watts"),
    "plan": ("plan", "schema"),
    "models": ("models",),
    "model": ("models", "vgg19"),
}
AGENT = {
    "probe": ("probe", "--root", ORIN),
    "profiles": ("profile", "list", "--root", ORIN),
    "settings": ("profile", "plan", "--max-mhz", 1000, "--root", "BOARD"),
    "doctor": ("doctor", "--root", ORIN),
}


def of_server(site: Path, name: str) -> Callable[[], None]:
    """Return a command on the site's run and readings."""
    run = folder_of(site / "runs").name
    words = [run if word == "RUN" else word for word in SERVER[name]]
    places = () if words[0] in ("models", "plan") else ("--data-dir", site / "runs")
    return lambda: run_server(*words, *places)


@pytest.mark.parametrize("name", SERVER)
def test_a_table_of_the_server_fits_the_terminal_and_keeps_its_figures(site, name):
    """At any width; a pipe has one, however wide the terminal beside it is."""
    command = of_server(site, name)
    wide, narrow = without_ages(piped(command, 300)), without_ages(piped(command, 30))
    assert wide == narrow
    figures = [] if name == "show" else wide  # on a terminal the bytes of many devices are one column
    for columns in (80, 40, 200):
        require_whole(without_ages(on_terminal(command, columns)), figures, columns)


def without_ages(lines: list[str]) -> list[str]:
    """Return lines without the ages at their end, which grow meanwhile."""
    return [re.sub(r"\b\d{1,2} s$", "", line).rstrip() for line in lines]


def test_eight_devices_have_a_column_each_on_a_terminal_and_in_a_pipe(site):
    """More are summarized, see `tests/edge_server/trial/test_rounds_table.py`."""
    command = of_server(site, "show")
    seen, whole = on_terminal(command, 80), piped(command, 80)
    figures = ["round", "updates", "personal", "accuracy", "loss", "seconds", "slowest", "joules"]
    assert set(NAMES) <= {word for line in seen for word in line.split()}
    [headings] = [line.split() for line in whole if line.startswith("round ")]
    assert headings == [*figures, *NAMES]
    [row] = [line.split() for line in whole if line.split()[:2] == ["2", "8"]]
    assert len(row) == len(headings)


@pytest.mark.parametrize("name", AGENT)
def test_a_table_of_the_agent_fits_the_terminal_and_keeps_its_figures(name, tmp_path):
    with_clocks(tmp_path, *(f"policy{number}" for number in (0, 4, 8)))
    words = [tmp_path if word == "BOARD" else word for word in AGENT[name]]
    command = lambda: run_agent(*words)  # noqa: E731
    whole = piped(command, 30)
    assert whole == piped(command, 300)
    for columns in (80, 60):
        require_whole(on_terminal(command, columns), whole, columns)


def test_a_replay_its_gap_and_a_study_fit_the_terminal(site, tmp_path):
    """They calculate, so each is run once on a terminal; the figures of the pipe are those of the same records."""
    runs, root = tmp_path / "runs", ("--data-root", site, "--data-dir", tmp_path / "runs")
    run = folder_of(site / "runs")
    for words in (("replay", site / "plan.toml"), ("replay", site / "plan.toml", "--compare", run)):
        seen = on_terminal(lambda words=words: run_server(*words, *root, "--workers", 1), 80)
        require_whole(seen, [], 80)
        assert any(line.split()[:2] in (["2", "8"], ["round_s", "2"]) for line in seen)
    study = write_study(
        tmp_path, f'name = "study-of-two-methods"\nplan = "plan.toml"\n{VARIANTS}\n[report]\ntarget = 0.2'
    )
    command = lambda: run_server("study", study, "--jobs", 1, "--data-root", tmp_path, "--data-dir", runs)  # noqa: E731
    require_whole(on_terminal(command, 80), piped(command, 30), 80)  # the second finds every cell done


def test_a_study_of_kills_and_a_calibration_fit_the_terminal(tmp_path):
    """Both take minutes, so here is what they print at their end."""
    counts = dict.fromkeys(("counted_twice", "duplicates", "retrained", "trained_twice", "rounds_lost"), 123456)
    runs = [Account(run=f"tiny-{n}", updates=99999, accepted=99999, difference=0.123456, **counts) for n in (1, 2)]
    struck = [KillResult(run="r", kind="server", name="server", phase="storing", marked=False)] * 1234567
    outcome = Outcome(
        record="runs/x", kills=1, struck=struck, runs=runs, total=total(runs), problem="a board ended " * 9, holds=False
    )
    whole = piped(lambda: show_kills(outcome, sys.stdout), 30)
    assert ["storing", "1234567", "1234567"] in [line.split() for line in whole]
    require_whole(on_terminal(lambda: show_kills(outcome, sys.stdout), 80), whole, 80)
    line = SensorLine(gain=1.234, offset_w=0.56, uncertainty=0.01)
    found = Calibration(profile="x", meter="y", stamp="z", residual_w=0.123, r_squared=0.987, line=line)
    require_whole(on_terminal(lambda: show_fit(found, tmp_path), 60), piped(lambda: show_fit(found, tmp_path), 30), 60)
