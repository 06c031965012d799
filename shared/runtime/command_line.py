"""What the commands of both sides have in common: `--version`, `-v`, and words for what is missing or refused."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shared.runtime.durable import REMEDIES

log = logging.getLogger(__name__)

EXTRAS: Mapping[str, Sequence[str]] = {
    "server": ("amqtt", "cvxpy", "numpy", "rich", "safetensors", "segno", "torch"),
    "release": ("onnx", "onnxruntime"),
    "device": ("httptools", "numpy", "onnxruntime", "safetensors", "torch"),
    "infer": ("httptools", "numpy", "onnxruntime", "safetensors"),
    "images": ("PIL",),
    "demo": ("sklearn",),
    "ray": ("ray",),
}
"""Top-level modules that an extra of the distribution brings, see `pyproject.toml`."""


_PATH = "look at the path that was given"
_RIGHTS = "run this as root, or as the user whose files these are"
REFUSALS: Mapping[int, str] = {
    **REMEDIES,
    **dict.fromkeys((errno.EACCES, errno.EPERM), _RIGHTS),
    **dict.fromkeys((errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP), _PATH),
}


def run_to_the_end(program: str, run: Callable[[], int], failed: int) -> int:
    """Run a command and return its exit code; what the system refuses is told in a line.

    Nobody who reads what is printed, as behind `| head`, ends it without a word.

    Args:
        program: What it is called.
        run: Does what was asked for, and returns its code.
        failed: The code where the system refuses something.
    """
    settle_streams()
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        log.debug("refused", exc_info=True)
        sys.stderr.write(f"{program}: {words_of(error)}\n")
    return failed


def settle_streams() -> None:
    """Have three standard streams even where some are closed, and let no character end a command.

    What is printed to a closed one is an error, as it is on a full disk; who reads from one finds nothing.
    """
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) <= 2:  # noqa: PLR2004 - whatever is opened later is none of them
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or Path(os.devnull).open()  # noqa: SIM115 - until the process ends
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - as above
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - as above
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def words_of(error: OSError) -> str:
    """Return what the system refused, and what to do."""
    told = error.strerror or str(error) or type(error).__name__
    remedy = REFUSALS.get(error.errno or 0, "")
    if error.filename is None and _drop_output():
        return f"standard output: {told}; some of what was to be printed is lost"
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"{where}{told}" + (f"; {remedy}" if remedy else "")


def _drop_output() -> bool:
    """Forget what cannot be printed, so that the interpreter does not try again; tell whether there was such."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):  # one that is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.stdout.flush()
        return True
    return False


class ShowVersion(argparse.Action):
    """Print the version of the distribution and end; it is looked up only then."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help="print the version and end")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print and end."""
        from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - not for an idle agent

        try:
            known = version("fieldfleet")
        except PackageNotFoundError:  # run from a folder that was never installed
            known = "unknown"
        parser.exit(message=f"{parser.prog} {known}\n")


def add_general_options(parser: argparse.ArgumentParser) -> None:
    """Declare `--version`, and `-v` for the command and for every verb below it."""
    parser.add_argument("--version", action=ShowVersion)
    help_ = "log more; twice for everything"
    parser.add_argument("-v", "--verbose", action="count", default=0, help=help_)
    below = _verbs(parser)
    while below:
        verb = below.pop()
        verb.add_argument("-v", "--verbose", action="count", default=argparse.SUPPRESS, help=help_)
        below += _verbs(verb)


def parse_all(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what a command line says; of what is left over, the error shows where it begins and ends.

    Args:
        parser: Of the command.
        arguments: Its words; None for those of this process.
    """
    options, rest = parser.parse_known_args(arguments)
    if rest:
        parser.error(f"nothing is known of {shlex.join(rest)}")
    return options


def _verbs(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    kinds = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
    return [verb for kind in kinds for verb in kind.choices.values()]


def missing_extra(module: str | None, usual: str) -> str:
    """Return what to install for a module that is not there; empty for one that no extra brings.

    Args:
        module: As the import names it, such as `rich.console`.
        usual: The extra to name where several bring it.
    """
    top = (module or "").partition(".")[0]
    bringing = [extra for extra, modules in EXTRAS.items() if top in modules]
    if not bringing:
        return ""
    extra = usual if usual in bringing else bringing[0]
    return f"the package of {top!r} is not installed here: pip install 'fieldfleet[{extra}]', or make setup in a clone"
