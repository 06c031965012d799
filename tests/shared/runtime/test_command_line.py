"""What the commands of both sides have in common, asked of fresh interpreters."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess  # noqa: TID251 - the command as an operator runs it
import sys

import pytest

from device_agent.__main__ import main as device_main
from edge_server.__main__ import main
from shared.runtime.extras import install_command
from shared.spelling import guess
from tests.edge_server.processes import captured
from tests.naming import names_all

MAINS = {"edge_server": main, "device_agent": device_main}
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


@pytest.mark.parametrize("side", MAINS)
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
    assert repr(lacks) in out
    assert install_command(extra) in out


@pytest.mark.parametrize("words", [("-v", "runs"), ("runs", "-v"), ("runs", "prune", "--keep", "9", "-vv")])
def test_more_is_logged_wherever_the_option_stands(tmp_path, words):
    ended = captured(*words, "--data-dir", tmp_path)
    assert ended.code in (0, None)
    assert "usage" not in ended.err


def test_every_positional_argument_has_a_word_of_help(monkeypatch, capsys):
    for verb in ("show", "explain", "chaos", "study", "report", "replay"):
        monkeypatch.setattr(sys, "argv", ["edge-server", verb, "--help"])
        with pytest.raises(SystemExit):
            main()
        out = capsys.readouterr().out
        assert "positional arguments:" in out, verb
        listed = out.partition("positional arguments:")[2].partition("options:")[0]
        assert re.findall(r"^  [A-Z|]+$\n(?!\s{4})", listed, re.MULTILINE) == [], verb


@pytest.mark.parametrize(
    ("side", "words", "meant"),
    [
        ("edge_server", ("shwo",), "show"),
        ("edge_server", ("plan", "chek"), "check"),
        ("edge_server", ("runs", "--format", "jsn"), "json"),
        ("device_agent", ("prob",), "probe"),
    ],
)
def test_a_mistyped_command_or_choice_is_answered_with_the_one_that_is_like_it(monkeypatch, capsys, side, words, meant):
    endings = []
    for line in (words, ("zzzzzz",)):
        monkeypatch.setattr(sys, "argv", [side, *line])
        with pytest.raises(SystemExit):
            MAINS[side]()
        endings.append(capsys.readouterr().err.rstrip())
    assert endings[0].endswith(guess(words[-1], [meant]))
    assert not endings[1].endswith("?")


def test_a_word_that_nobody_knows_can_be_seen_in_the_error(monkeypatch, capsys):
    """Also an empty one, as of a variable of the shell that nobody set."""
    monkeypatch.setattr(sys, "argv", ["edge-server", "release", "list", "", "two words"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "'' 'two words'" in capsys.readouterr().err


PRINTING = "import sys; from shared.runtime.command_line import run_command as run; sys.exit(run('prog', {run}, 7))"
PRINT = "lambda: print(chr(177)) or 0"


@pytest.mark.parametrize(
    ("run", "redirection", "code", "named"),
    [
        (PRINT, ">&-", 7, ["Bad file descriptor"]),
        (PRINT, ">/dev/full", 7, ["No space left on device"]),
        (PRINT, "| true", 0, []),
        ("lambda: print('x' * 10**6) or 0", "| true", 0, []),
        (PRINT, "<&-", 0, []),
        (PRINT, "2>&-", 0, []),
        ("lambda: sys.exit(print(1) or 3)", ">/dev/full", 7, ["No space left on device"]),
        ("lambda: open('/dev/null/x')", "", 7, ["/dev/null/x", "Not a directory"]),
        ("lambda: open('/proc/1/no') and 0", "", 7, ["/proc/1/no", "No such file or directory"]),
        ("lambda: int(sys.stdin.read() != '')", "<&-", 0, []),
    ],
)
async def test_what_the_system_refuses_is_a_line_and_a_code(run, redirection, code, named):
    program = PRINTING.format(run=run).replace('"', "'")
    line = f'PYTHONIOENCODING=ascii {sys.executable} -c "{program}" {redirection}'
    child = await asyncio.create_subprocess_exec(
        "sh", "-c", line, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    told = (await child.communicate())[1]
    found, told = child.returncode, told.decode()
    assert (found, names_all(told, *named), len(told.splitlines())) == (code, True, int(bool(named))), told
    assert told.startswith("prog: ") == bool(named)


POSIX = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""What keeps Python from taking names of files as UTF-8, as a service or a container may."""


def ended(*command: str | bytes, **settings: str) -> tuple[int, bytes, bytes]:
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, check=False)  # noqa: S603 - ours
    return done.returncode, done.stdout, done.stderr


def test_paths_that_are_not_ascii_work_under_a_forced_posix_locale(tmp_path):
    """In the command line, in a file, and in a process that a process starts."""
    place = tmp_path / "Prüfstand"
    place.mkdir()
    (place / "agent.toml").write_text(
        'device = "a"\nsite = "lab"\nstate_dir = "zustände"\n'
        '[broker]\nport = 1\n[data]\nsource = "csv"\npath = "möbel.csv"\n',
        "utf-8",
    )
    command = (sys.executable, "-m", "device_agent", "doctor", "--config", str(place / "agent.toml"))
    code, out, err = ended(*command, **POSIX)
    assert (code, err) == (1, b"")
    assert "möbel.csv" in out.decode()
    assert "zustände" in out.decode()
    (place / "plan.toml").write_text("rounds = 1\n", "utf-8")
    code, out, err = ended(sys.executable, "-m", "edge_server", "plan", "check", str(place / "plan.toml"), **POSIX)
    assert code == 2
    assert all("Prüfstand" in line for line in err.decode().splitlines())


def test_a_path_that_is_not_utf8_is_refused_in_a_line(tmp_path):
    """It could not be sent, recorded or printed."""
    path = os.fsencode(tmp_path) + b"/M\xfcll.toml"
    for package, verb in (("device_agent", "doctor"), ("edge_server", "run")):
        code, out, err = ended(sys.executable, "-m", package, verb, "--config", path)
        assert (code, out) == (2, b"")
        assert rb"M\udcfcll.toml" in err.splitlines()[-1]
