"""What the commands of both sides have in common, asked of fresh interpreters."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest

from edge_server.__main__ import main

SIDES = ("edge_server", "device_agent")
WITHOUT = "import sys; sys.modules[{lacks!r}] = None; from {side}.__main__ import main; main()"


def said(side: str, *words: str, lacks: str = "nothing_at_all") -> tuple[int | None, str]:
    """Return the exit code and the output of a command line, in an interpreter that lacks a module."""

    async def ask() -> tuple[int | None, bytes]:
        program = WITHOUT.format(lacks=lacks, side=side)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, *words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        return child.returncode, (await child.communicate())[0]

    code, out = asyncio.run(ask())
    return code, out.decode()


@pytest.mark.parametrize("side", SIDES)
def test_a_command_says_its_version(side):
    _, out = said(side, "--version")
    assert re.fullmatch(rf"{side.replace('_', '-')} \d+\.\d+\S*\n", out)


@pytest.mark.parametrize(
    ("lacks", "words", "extra"),
    [
        ("torch", ("models", "mlp"), "server"),
        ("rich", ("trial", "run", "deploy/plans/demo.toml"), "server"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(lacks, words, extra):
    """One line, not a traceback."""
    _, out = said("edge_server", *words, lacks=lacks)
    assert len(out.splitlines()) == 1
    assert f"{lacks!r} is not installed here: pip install 'fieldfleet[{extra}]'" in out


@pytest.mark.parametrize("words", [("-v", "runs"), ("runs", "-v"), ("runs", "prune", "--keep", "9", "-vv")])
def test_more_is_logged_wherever_the_option_stands(tmp_path, words):
    _, out = said("edge_server", *words, "--data-dir", str(tmp_path))
    assert "usage" not in out
    assert "Traceback" not in out


def test_every_positional_argument_has_a_word_of_help(monkeypatch, capsys):
    for verb in ("show", "explain", "chaos", "study", "report", "replay"):
        monkeypatch.setattr(sys, "argv", ["edge-server", verb, "--help"])
        with pytest.raises(SystemExit):
            main()
        out = capsys.readouterr().out
        assert "positional arguments:" in out, verb
        listed = out.partition("positional arguments:")[2].partition("options:")[0]
        assert re.findall(r"^  [A-Z|]+$\n(?!\s{4})", listed, re.MULTILINE) == [], verb


def test_a_word_that_nobody_knows_can_be_seen_in_the_error(monkeypatch, capsys):
    """Also an empty one, as of a variable of the shell that nobody set."""
    monkeypatch.setattr(sys, "argv", ["edge-server", "release", "list", "", "two words"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "nothing is known of '' 'two words'" in capsys.readouterr().err
