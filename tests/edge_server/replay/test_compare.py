"""Comparison of a run with its replay: known differences are found."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_server.cli import replay
from edge_server.journal import checkpoints
from edge_server.journal.records import AnyRecord, CostSettled, RoundClosed, RunOpened, UpdateAccepted
from edge_server.journal.runs import StoredRun
from edge_server.replay.comparison import stored_runs
from edge_server.replay.comparison.compare import FIGURES, ROUND, Gap, MatchCount, Pair, compare_runs, error_spread
from edge_server.replay.comparison.compare_page import page
from edge_server.replay.comparison.compare_text import bar, lines, percent
from shared.errors import ConfigError
from shared.protocol.messages import Transfer
from shared.tensors.tree import State
from tests.edge_server.report.journals import BEGAN
from tests.edge_server.report.journals import field_closed as closed
from tests.edge_server.report.journals import field_cost as cost
from tests.edge_server.report.journals import field_opened as opened
from tests.edge_server.report.journals import field_plan as plan
from tests.edge_server.report.journals import field_update as update
from tests.naming import names_all, naming

DEVICES = ("orin", "pi-10")
Change = Callable[[AnyRecord], AnyRecord | None]


def journal(folder: Path, name: str, *, slower: float = 1.0, rounds: int = 2) -> list[AnyRecord]:
    """Return a run of two devices; everything takes `slower` times as long as in round 1, 10 s, and round 2, 20 s."""
    records: list[AnyRecord] = [RunOpened(run=name, plan=plan(folder))]
    for number in range(1, rounds + 1):
        records.append(opened(number, DEVICES, 100.0 * number))
        for device in DEVICES:
            told, at = cost(device, number), BEGAN + 100.0 * number + 5.0
            settled = msgspec.structs.replace(told, compute_s=slower * (told.compute_s or 0.0))
            records += [
                UpdateAccepted(round=number, device=device, update=update(device, number), bytes_up=4050, at=at),
                CostSettled(round=number, device=device, cost=settled),
            ]
        seconds, came = slower * 10.0 * number, {"arrived": DEVICES, "bytes_up": dict.fromkeys(DEVICES, 4050)}
        down = {"bytes_down": dict.fromkeys(DEVICES, 4000)}
        records.append(closed(number, 100.0 * number + seconds, seconds=seconds, **came, **down))
    return records


def changed(records: list[AnyRecord], change: Change) -> list[AnyRecord]:
    """Return a journal with some records changed, or without those that become None."""
    return [one for record in records if (one := change(record)) is not None]


def test_a_run_against_itself_has_no_gap(tmp_path):
    run = journal(tmp_path, "run")
    found = compare_runs(run, run, "same")
    assert {one.exact == one.count for one in found.spreads} == {True}
    assert {one.most for one in found.spreads} == {0.0}
    assert (found.starts, found.updates) == (MatchCount(same=4, of=4), MatchCount(same=4, of=4))
    assert (found.rounds, found.model) == (2, "same")


def test_known_gaps_come_out_as_they_were_put_in(tmp_path):
    """All rounds and computing a tenth longer, all else the same: 10 % there, in each quantile, and exact elsewhere."""
    found = compare_runs(journal(tmp_path, "run"), journal(tmp_path, "again", slower=1.1))
    far = {one.figure: one for one in found.spreads if one.exact < one.count}
    assert far.keys() == {"round_s", "compute_s"}
    for one in far.values():
        quantiles = (one.least_tenth, one.median, one.most_tenth, one.most, one.median_signed)
        assert quantiles == pytest.approx([0.1] * 5)
        assert one.exact == 0
    assert [one.recorded for one in found.pairs if one.figure == "round_s"] == [10.0, 20.0]
    assert found.spread("bytes_up").count == 4
    assert found.spread("payload_up_bytes").exact == 4


def test_a_shorter_replay_has_a_sign_and_the_quantiles_have_none(tmp_path):
    one = compare_runs(journal(tmp_path, "run", slower=1.25), journal(tmp_path, "again")).spread("round_s")
    assert (one.median, one.median_signed) == pytest.approx((0.2, -0.2))


def test_what_has_no_pair_is_said_with_its_reason(tmp_path):
    """A round more; an update that came late; joules that only one of them knows, and such that nobody knows."""
    run, again = journal(tmp_path, "run", rounds=3), journal(tmp_path, "again")

    def late(record: AnyRecord) -> AnyRecord | None:
        if isinstance(record, UpdateAccepted) and (record.round, record.device) == (2, "pi-10"):
            return None
        if isinstance(record, RoundClosed) and record.round == 2:
            return msgspec.structs.replace(record, arrived=("orin",))
        return record

    def without_joules(record: AnyRecord) -> AnyRecord:
        if isinstance(record, CostSettled) and (record.round, record.device) == (1, "orin"):
            return msgspec.structs.replace(record, cost=msgspec.structs.replace(record.cost, compute_joules=None))
        return record

    found = compare_runs(run, changed(changed(again, late), without_joules))
    counts = {
        what: sorted(one.count for one in found.skipped if one.what == what)
        for what in {one.what for one in found.skipped}
    }
    assert counts["round"] == [1], "recorded only"
    assert counts["task"] == [1, 2], "one arrived in the one run and late in the other; two recorded only"
    assert counts["compute_joules"] == [1, 1], "one known in neither run, one in the recorded one only"
    assert counts["device_accuracy"] == [2], "known in neither run"
    assert any(names_all(one.why, "arrived", "late") for one in found.skipped if one.what == "task")
    assert found.spread("compute_joules").count == 1
    assert len(lines(found)[3:]) == len(found.skipped)


def test_other_bits_are_seen_though_every_figure_agrees(tmp_path):
    def other(record: AnyRecord) -> AnyRecord:
        if isinstance(record, UpdateAccepted) and record.round == 2:
            params = Transfer(digest=b"\xff" * 16, size=4000, frame_bytes=262144)
            told = msgspec.structs.replace(record.update, params=params, start=b"\x02" * 16)
            return msgspec.structs.replace(record, update=told)
        return record

    found = compare_runs(journal(tmp_path, "run"), changed(journal(tmp_path, "again"), other), "different")
    assert (found.starts, found.updates) == (MatchCount(same=2, of=4), MatchCount(same=2, of=4))
    assert {one.most for one in found.spreads} == {0.0}
    assert lines(found)[2].count("2 of 4") == 2


def test_zero_recorded_and_something_replayed_is_an_error_without_bound():
    pairs = [Pair(figure="loss", round=n, recorded=a, replayed=b) for n, a, b in ((1, 0.0, 0.1), (2, 2.0, 3.0))]
    found = error_spread("loss", pairs)
    assert (found.count, found.boundless, found.median) == (2, 1, 0.5)


@given(st.lists(st.tuples(st.floats(0.01, 1e6), st.floats(0.0, 1e6)), min_size=1, max_size=30))
def test_quantiles_are_in_order_and_the_last_is_the_largest(figures):
    pairs = [Pair(figure="round_s", round=n, recorded=a, replayed=b) for n, (a, b) in enumerate(figures)]
    one = error_spread("round_s", pairs)
    assert one.least_tenth <= one.median <= one.most_tenth <= one.most
    assert one.most == max(abs(b - a) / a for a, b in figures)


def test_the_page_needs_nothing_else_and_holds_every_figure(tmp_path):
    """Recorded and replayed points of each round and device; whatever a device is called, it is no markup."""
    found = compare_runs(journal(tmp_path, "run"), journal(tmp_path, "again", slower=1.1), "unknown", "<b>no file</b>")
    text = page(found)
    assert "src=" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert "<b>no file</b>" not in text
    for one in found.spreads:
        assert one.figure in text
    for name in ("Device orin", "Device pi-10", "round 2: 22.0; error +10.00 %"):
        assert name in text


def test_bars_and_percents_are_for_the_eye():
    assert [bar(error) for error in (0.0, 0.1, 0.2, 9.0)] == ["", "█" * 8, "█" * 16, "█" * 16]
    assert [percent(error) for error in (0.0, 0.1234, 1e-9)] == ["0", "12.34 %", "1e-07 %"]
    assert set(ROUND) < set(FIGURES)


def kept(folder: Path, run: str, value: float | None) -> StoredRun:
    """Return a run with a checkpoint of its last round, None for without."""
    if value is not None:
        checkpoints.save(folder / run / "checkpoints", 2, State({"w": torch.tensor([value, 1.0])}), durable=False)
    return StoredRun(folder / run, journal(folder, run))


def test_the_final_models_are_compared_bit_by_bit(tmp_path):
    """One unit in the last place is another model; where there is no checkpoint, nobody knows."""
    run = kept(tmp_path, "run", 1.0)
    assert stored_runs.compare_models(run, kept(tmp_path, "one", 1.0)) == ("same", "")
    assert stored_runs.compare_models(run, kept(tmp_path, "two", 1.0 + 2**-23)) == ("different", "")
    model, why = stored_runs.compare_models(run, kept(tmp_path, "three", None))
    assert model == "unknown"
    assert why
    shorter = StoredRun(tmp_path / "one", journal(tmp_path, "one", rounds=1))
    model, why = stored_runs.compare_models(run, shorter)
    assert model == "unknown"
    assert names_all(why, 2, 1)
    [path] = (tmp_path / "one" / "checkpoints").glob("round-*")
    path.write_bytes(path.read_bytes()[:-1])
    assert stored_runs.compare_models(run, StoredRun(tmp_path / "one", journal(tmp_path, "one")))[0] == "unknown"


def test_the_command_says_it_all_and_fails_only_where_it_is_asked_to(tmp_path, capsys):
    """10 % off: code 0, unless more than 9 % is too much; the page lies where it was asked for."""
    run, again = kept(tmp_path, "run", 1.0), StoredRun(tmp_path / "again", journal(tmp_path, "again", slower=1.1))
    options = argparse.Namespace(fail_above=None, html=tmp_path / "gap.html", format="table")
    assert replay.compare_with_recorded(options, [run], [again]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[:3] for line in shown.splitlines() if "round_s" in line] == [["round_s", "2", "0"]]
    assert names_all(shown, options.html)
    assert options.html.read_text().startswith("<!doctype html>")
    options = argparse.Namespace(fail_above=0.09, html=None, format="json")
    assert replay.compare_with_recorded(options, [run], [again]) == 1
    found = msgspec.json.decode(capsys.readouterr().out, type=Gap)
    assert found.spread("round_s").median == pytest.approx(0.1)
    assert json.loads(msgspec.json.encode(found))["model"] == "unknown"
    assert replay.exit_code(found, 0.11) == 0
    assert replay.exit_code(msgspec.structs.replace(found, spreads=[]), 0.11) == 1


def test_a_run_that_is_not_there_is_told_before_anything_is_played(tmp_path):
    with pytest.raises(ConfigError, match=naming("gone", tmp_path)):
        replay.find_recorded(argparse.Namespace(compare="gone", data_dir=tmp_path))
    asked = {"compare": None, "html": None, "fail_above": None, "data_dir": tmp_path}
    assert replay.find_recorded(argparse.Namespace(**asked)) == []
    for option in ({"html": tmp_path / "gap.html"}, {"fail_above": 0.1}):
        with pytest.raises(ConfigError, match=naming("--compare")):
            replay.find_recorded(argparse.Namespace(**{**asked, **option}))
