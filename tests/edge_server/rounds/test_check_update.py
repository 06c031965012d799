"""Stored updates: what a round keeps of those before it."""

from __future__ import annotations

from edge_server.rounds.check_update import prune_updates


def test_what_is_kept_grows_with_the_cohort(tmp_path):
    """Devices of the round keep theirs, or get a file to overwrite; notes of others, and what is left over, go."""
    for name in ("a", "b", "c", "d", ".b", ".a"):
        (tmp_path / name).write_text(name)
    prune_updates(tmp_path, {"a", "x"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "a", ".a": ".a", "x": "b"}
    prune_updates(tmp_path / "nothing", {"a"})
