"""Options and error handling shared by both command lines."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeAlias

from shared.errors import escape_text
from shared.runtime.durable import REMEDIES
from shared.runtime.extras import EXTRAS, find_packaged_config, install_command
from shared.spelling import guess

log = logging.getLogger(__name__)

MOST_SHOWN = 200
"""Characters of a text that a message quotes."""
RENAME = "rename the file or folder"
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
_PATH = "check the path"
_RIGHTS = "run this as root, or as the user who owns the files"
REFUSALS: Mapping[int, str] = {
    **REMEDIES,
    **dict.fromkeys((errno.EACCES, errno.EPERM), _RIGHTS),
    **dict.fromkeys((errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP), _PATH),
}


Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - as its stubs name it
"""Type of `ArgumentParser.add_subparsers`; argparse has no public name for it."""


def add_command(commands: Subparsers, name: str, summary: str) -> argparse.ArgumentParser:
    """Add a command whose own help begins with its summary."""
    return commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")


def add_config(parser: argparse.ArgumentParser, name: str, help_: str) -> None:
    """Add `--config`, required unless a Debian package has installed its own file.

    Args:
        name: Name of the package's file, such as `agent.toml`.
        help_: Contents of the file, for `--help`.
    """
    usual = find_packaged_config(name)
    about = f"{help_}; default: {usual}" if usual else help_
    parser.add_argument("--config", type=Path, default=usual, required=usual is None, metavar="FILE", help=about)


def run_command(program: str, run: Callable[[], int], failed: int) -> int:
    """Run a command and return its exit code; OS errors are printed in one line.

    A reader that closes the pipe, such as `| head`, ends the command silently.

    Args:
        run: The command; returns its exit code.
        failed: Exit code for OS errors.
    """
    ensure_streams()
    _use_utf8_paths()
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        log.debug("OS error", exc_info=True)
        sys.stderr.write(f"{program}: {describe_os_error(error)}\n")
    except UnicodeEncodeError as error:
        log.debug("not UTF-8", exc_info=True)
        sys.stderr.write(f"{program}: {error.object[:MOST_SHOWN]!a} is not UTF-8 text; {RENAME}\n")
    return failed


def _use_utf8_paths() -> None:
    """Restart this process in Python's UTF-8 mode where the locale has another encoding for file names.

    File names are UTF-8 on every Linux of today, and configurations are UTF-8; under the POSIX locale, a service's or a
    container's, Python could open no file whose name is not ASCII. Child processes inherit the mode.
    """
    if sys.flags.utf8_mode or sys.getfilesystemencoding().lower() in ("utf-8", "utf8"):
        return
    if (encoding := sys.stdout.encoding.lower()) not in ("ascii", "ansi_x3.4-1968"):
        os.environ.setdefault("PYTHONIOENCODING", f"{encoding}:backslashreplace")  # what the terminal shows
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606 - the same command


def ensure_streams() -> None:
    """Open closed standard streams, and escape characters that a stream cannot encode.

    Printing to a closed output is an error, as on a full disk; a closed input is empty.
    """
    while (descriptor := os.open(os.devnull, os.O_RDONLY)) <= 2:  # noqa: PLR2004 - later files must not get 0 to 2
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or Path(os.devnull).open()  # noqa: SIM115 - until the process ends
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - as above
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - as above
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def describe_os_error(error: OSError) -> str:
    """Describe an OS error with its remedy."""
    reason = error.strerror or str(error) or type(error).__name__
    remedy = REFUSALS.get(error.errno or 0, "")
    if error.filename is None and _drop_output():
        return f"standard output: {reason}; part of the output is lost"
    where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    return f"{where}{reason}" + (f"; {remedy}" if remedy else "")


def _drop_output() -> bool:
    """Discard output that cannot be printed, so that the interpreter does not retry; return whether there was any."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):  # a stream that is not a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.stdout.flush()
        return True
    return False


class ShowVersion(argparse.Action):
    """Print the version of the distribution and exit; the lookup is slow, so it happens only then."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print and exit."""
        from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - not for an idle agent

        try:
            installed = version("fieldfleet")
        except PackageNotFoundError:  # run from a clone that was never installed
            installed = "unknown"
        parser.exit(message=f"{parser.prog} {installed}\n")


def add_general_options(parser: argparse.ArgumentParser) -> None:
    """Add `--version`, and `-v` for the command and for all its subcommands."""
    parser.add_argument("--version", action=ShowVersion)
    help_ = "log more; twice for everything"
    parser.add_argument("-v", "--verbose", action="count", default=0, help=help_)
    below = _verbs(parser)
    while below:
        verb = below.pop()
        verb.add_argument("-v", "--verbose", action="count", default=argparse.SUPPRESS, help=help_)
        verb.error = partial(_guess_and_end, verb.error)  # type: ignore[method-assign]
        below += _verbs(verb)
    parser.error = partial(_guess_and_end, parser.error)  # type: ignore[method-assign]


def _guess_and_end(end: Callable[[str], NoReturn], message: str) -> NoReturn:
    """Exit as argparse does, with a guess of the intended choice."""
    if match := _CHOICE.search(message):
        choices = re.findall(r"'([^']*)'|([^\s,'()]+)", match[2])
        message += guess(match[1], [quoted or plain for quoted, plain in choices])
    end(message)


def parse_all(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line; the error for unknown arguments quotes them.

    Args:
        arguments: None for those of this process.
    """
    argv = sys.argv[1:] if arguments is None else arguments
    for argument in argv:
        if escape_text(argument) != argument:
            parser.error(f"{argument!a} is not UTF-8 text; {RENAME}")
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        import shlex  # noqa: PLC0415 - not for an idle agent

        parser.error(f"unknown arguments: {shlex.join(unknown)}")
    return options


def _verbs(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    kinds = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
    return [verb for kind in kinds for verb in kind.choices.values()]


def missing_extra(module: str | None, usual: str) -> str:
    """Return the command that installs a missing module; empty where no extra has it.

    Args:
        module: Module name of the failed import, such as `rich.console`.
        usual: The extra to name where several have it.
    """
    top = (module or "").partition(".")[0]
    bringing = [extra for extra, modules in EXTRAS.items() if top in modules]
    if not bringing:
        return ""
    extra = usual if usual in bringing else bringing[0]
    return f"the Python package {top!r} is not installed: {install_command(extra)}"
