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


PRINTING = "import sys; from shared.runtime.command_line import run_to_the_end as run; sys.exit(run('prog', {run}, 7))"
PRINT = "lambda: print(chr(177)) or 0"


@pytest.mark.parametrize(
    ("run", "redirection", "code", "words"),
    [
        (PRINT, ">&-", 7, "prog: standard output: Bad file descriptor; some of what was to be printed is lost\n"),
        (PRINT, ">/dev/full", 7, "prog: No space left on device; "),
        (PRINT, "| true", 0, ""),
        ("lambda: print('x' * 10**6) or 0", "| true", 0, ""),
        (PRINT, "<&-", 0, ""),
        (PRINT, "2>&-", 0, ""),
        ("lambda: sys.exit(print(1) or 3)", ">/dev/full", 7, "prog: No space left"),
        ("lambda: open('/dev/null/x')", "", 7, "prog: /dev/null/x: Not a directory; look at the path that was given\n"),
        ("lambda: open('/proc/1/no') and 0", "", 7, "prog: /proc/1/no: No such file or directory; look at the path"),
        ("lambda: int(sys.stdin.read() != '')", "<&-", 0, ""),
    ],
)
def test_what_the_system_refuses_is_a_line_and_a_code(run, redirection, code, words):
    program = PRINTING.format(run=run).replace('"', "'")

    async def ask():
        line = f'PYTHONIOENCODING=ascii {sys.executable} -c "{program}" {redirection}'
        child = await asyncio.create_subprocess_exec(
            "sh", "-c", line, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        told = (await child.communicate())[1]
        return child.returncode, told.decode()

    found, told = asyncio.run(ask())
    assert (found, told.startswith(words), len(told.splitlines())) == (code, True, int(bool(words))), told
