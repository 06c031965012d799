"""`edge-server trace`: export a run; import or check a trace."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edge_server.cli import folders
from shared.runtime.command_line import add_command

TRACE = "folder of a trace"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    export = add_command(verbs, "export", "write a run as a folder with a header and CSV tables")
    export.add_argument("run", metavar="RUN", help=folders.RUN_HELP)
    export.add_argument("--out", type=Path, metavar="DIR", help="new folder; default: RUN.trace")
    export.add_argument("--anonymous", action="store_true", help="replace device names by numbers")
    bring = add_command(verbs, "import", "import a trace as a run that `show`, `report` and `replay` accept")
    bring.add_argument("folder", type=Path, metavar="DIR", help=TRACE)
    bring.add_argument("--as", dest="name", default="", metavar="NAME", help="name of the new run")
    check = add_command(verbs, "check", "validate a trace and summarize it")
    check.add_argument("folder", type=Path, metavar="DIR", help=TRACE)
    folders.add_options(export, data=True)
    folders.add_options(bring)


def trace(options: argparse.Namespace) -> int:
    """Export, import or check a trace."""
    from edge_server.replay.trace import files, header, transfer  # noqa: PLC0415

    if options.verb == "export":
        folder = options.out or _default_folder(options)
        exported = transfer.export(
            options.data_dir, options.run, folder, options.data_root, anonymous=options.anonymous
        )
        _print(f"{transfer.summary(exported)}\ntrace: {folder}")
        return 0
    from edge_server.rounds.check_plan import check  # noqa: PLC0415 - it builds the model

    exported = files.read(options.folder)
    check(exported.header.plan, options.folder / header.FILE)
    if options.verb == "import":
        _print(f"record: {transfer.import_trace(exported, options.data_dir, options.name)}")
    else:
        _print(transfer.summary(exported))
    return 0


def _default_folder(options: argparse.Namespace) -> Path:
    """Return the default folder of a run's trace, next to the run if it was given by path."""
    from edge_server.journal.runs import find_run  # noqa: PLC0415

    path = Path(options.run.rstrip("/"))
    name = path if path.exists() else Path(find_run(options.data_dir, options.run).folder.name)
    return name.with_name(f"{name.name}.trace")


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
