"""What the commands of both sides have in common: `--version`, `-v`, and the word for a package that is missing."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence

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
