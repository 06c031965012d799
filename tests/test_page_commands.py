"""Commands in the documentation exist, and those of the README run."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from device_agent.__main__ import COMMANDS as AGENT_COMMANDS
from device_agent.__main__ import build_parser as build_agent_parser
from edge_server.__main__ import build_parser as build_server_parser
from tests.edge_server.processes import captured, started

ROOT = Path(__file__).parents[1]
LIMIT_S = 300.0
PLACEHOLDERS = {"N": "3", "X": "0.5", "S": "5", "SECONDS": "5", "SHARE": "0.5", "W": "1", "COUNT": "3"}
"""Words of the pages that stand for numbers; all others are taken as they are."""
LINE = re.compile(r"^(?: {4,}|\t|\$ )?(?:sudo )?((?:edge-server|device-agent) .*)$", re.MULTILINE)
INLINE = re.compile(r"`(?:sudo )?((?:edge-server|device-agent) [^`]+)`")
TARGET = re.compile(r"`make ([a-z-]+)|^ {4}make ([a-z-]+)", re.MULTILINE)


def pages() -> list[Path]:
    return [path for path in ROOT.rglob("*.md") if not {".venv", "build", "runs"} & set(path.relative_to(ROOT).parts)]


def words_of(command: str) -> list[str]:
    """Return the words of a printed command: without its comment, what may be left out, and what follows it."""
    plain = re.sub(r"\s#.*$", "", command)
    plain = re.split(r"\s(?:&&|\||>|;)\s", plain)[0].rstrip(";&")
    while plain != (shorter := re.sub(r"\s*\[[^\[\]]*\]", "", plain)):
        plain = shorter
    words = [word.split("|")[0] for word in shlex.split(plain) if word not in ("…", "...", "\\")]
    words = [PLACEHOLDERS.get(word, word) for word in words]
    return [word.rstrip("…,.") if word != "." else word for word in words]


def commands(page: Path) -> list[str]:
    text = page.read_text()
    return list(dict.fromkeys([*LINE.findall(text), *INLINE.findall(text)]))


def parsed(program: str, words: list[str]) -> str:
    """Return what the program's parser says against a command; nothing where it takes it."""
    parser = build_server_parser() if program == "edge-server" else build_agent_parser(AGENT_COMMANDS)
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            parser.parse_args(words)
        except SystemExit as ended:
            return said.getvalue().strip().splitlines()[-1] if ended.code else ""
        except argparse.ArgumentError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_one(page):
    """Its verb and its options are there; an inline one may leave out what it needs besides."""
    faults = []
    for command in commands(page):
        program, *words = words_of(command)
        fault = parsed(program, words) if words else ""
        is_short = any(text in fault for text in (" required", "expected one argument", "expected at least one"))
        if fault and not (is_short and f"`{command}`" in page.read_text()):
            faults.append(f"{command}: {fault}")
    assert faults == []


def test_every_make_target_of_the_pages_is_one():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {one or other for page in pages() for one, other in TARGET.findall(page.read_text())}
    assert named <= targets


@pytest.mark.slow
@pytest.mark.broker
def test_the_first_pages_commands_run_as_printed(tmp_path, monkeypatch):
    """After the demo, in its order, with the last run for RUN; a rollout wants boards, and has tests of its own.

    The demo is a process as a user starts it; the others run in this one, which has torch already.
    """
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    demo = re.search(r"^demo:.*\n\t@\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert demo
    text = (ROOT / "README.md").read_text()
    shown = LINE.findall(text[text.index("## What the demo shows") : text.index("## Plans")])
    assert len(shown) >= 7
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with started("edge_server", *words_of(demo[1])[1:], cwd=tmp_path, log=tmp_path / "demo.log") as process:
        assert process.wait(LIMIT_S) == 0, (tmp_path / "demo.log").read_text()[-3000:]
    for command in (one for one in shown if " rollout " not in one):
        program, *words = words_of(command.replace(" RUN", " last"))
        assert program == "edge-server"
        done = captured(*words)
        assert done.code == 0, f"{command}: {done.out[-1000:]}{done.err[-2000:]}"
