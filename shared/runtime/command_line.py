"""What the commands of both sides have in common: `--version`, `-v`, and words for what is missing or refused."""

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
from typing import NoReturn

from shared.errors import escape_text
from shared.runtime.durable import REMEDIES
from shared.runtime.extras import EXTRAS, install_command, packaged_config
from shared.spelling import guess

log = logging.getLogger(__name__)

MOST_SHOWN = 200
"""Characters of a text that a message shows."""
RENAME = "rename the file or folder"
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
_PATH = "look at the path that was given"
_RIGHTS = "run this as root, or as the user whose files these are"
REFUSALS: Mapping[int, str] = {
    **REMEDIES,
    **dict.fromkeys((errno.EACCES, errno.EPERM), _RIGHTS),
    **dict.fromkeys((errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP), _PATH),
}


def add_config(parser: argparse.ArgumentParser, name: str, help_: str) -> None:
    """Add `--config`, which must be given except where a Debian package's own file is there.

    Args:
        name: Of the package's file, such as `agent.toml`.
        help_: What the file says.
    """
    usual = packaged_config(name)
    about = f"{help_}; default: {usual}" if usual else help_
    parser.add_argument("--config", type=Path, default=usual, required=usual is None, metavar="FILE", help=about)


def run_to_the_end(program: str, run: Callable[[], int], failed: int) -> int:
    """Run a command and return its exit code; what the system refuses is told in a line.

    Nobody who reads what is printed, as behind `| head`, ends it without a word.

    Args:
        program: What it is called.
        run: Does what was asked for, and returns its code.
        failed: The code where the system refuses something.
    """
    settle_streams()
    _use_utf8_paths()
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
    except UnicodeEncodeError as error:
        log.debug("not UTF-8", exc_info=True)
        sys.stderr.write(f"{program}: {error.object[:MOST_SHOWN]!a} is not UTF-8 text; {RENAME}\n")
    return failed


def _use_utf8_paths() -> None:
    """Start this process again in Python's UTF-8 mode where the locale says that file names are something else.

    Names of files are UTF-8 on every Linux of today, and configurations are UTF-8; under the POSIX locale, a service's
    or a container's, Python could open no file whose name is not ASCII. Processes that are started from here do alike.
    """
    if sys.flags.utf8_mode or sys.getfilesystemencoding().lower() in ("utf-8", "utf8"):
        return
    if (encoding := sys.stdout.encoding.lower()) not in ("ascii", "ansi_x3.4-1968"):
        os.environ.setdefault("PYTHONIOENCODING", f"{encoding}:backslashreplace")  # what the terminal shows
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606 - this very command


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
        verb.error = partial(_guess_and_end, verb.error)  # type: ignore[method-assign]
        below += _verbs(verb)
    parser.error = partial(_guess_and_end, parser.error)  # type: ignore[method-assign]


def _guess_and_end(end: Callable[[str], NoReturn], message: str) -> NoReturn:
    """End as argparse does, with the choice that was probably meant."""
    if found := _CHOICE.search(message):
        known = re.findall(r"'([^']*)'|([^\s,'()]+)", found[2])
        message += guess(found[1], [quoted or plain for quoted, plain in known])
    end(message)


def parse_all(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what a command line says; of what is left over, the error shows where it begins and ends.

    Args:
        arguments: Its words; None for those of this process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    for word in words:
        if escape_text(word) != word:
            parser.error(f"{word!a} is not UTF-8 text; {RENAME}")
    options, rest = parser.parse_known_args(words)
    if rest:
        import shlex  # noqa: PLC0415 - not for an idle agent

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
    return f"the Python package {top!r} is not installed: {install_command(extra)}"
