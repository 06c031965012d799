"""`edge-server export` and `release`: a run's model as a file, and as releases."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from edge_server.cli import folders
from edge_server.cli.terminal import write_text
from shared import registry
from shared.data.classes import format_class_names
from shared.errors import ConfigError
from shared.protocol.units import BYTES, choose_unit
from shared.runtime import processes
from shared.runtime.command_line import add_command
from shared.runtime.processes import loading
from shared.runtime.service import notify_supervisor
from shared.runtime.text_table import TextColumn, TextTable

if TYPE_CHECKING:
    from edge_server.release.run_model import RunModel
    from edge_server.release.store import StoredRelease
    from shared.protocol.inference.release import Preprocessing, Reduction, ReleaseManifest, ReleaseTask

log = logging.getLogger(__name__)

RELEASE = "NAME/VERSION, or NAME for the newest version"
FORMATS = ("onnx", "safetensors", "torchscript")


def export_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `export`."""
    _model_arguments(parser)
    help_ = "onnx: graph and weights; safetensors: weights only; torchscript: for libtorch"
    parser.add_argument("--format", choices=FORMATS, required=True, help=help_)
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: RUN-round-N with the format's suffix, in the current folder"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    folders.add_options(parser)


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=folders.RUN_HELP)
    help_ = (
        "use the model after this round; default: the most accurate or the last one, by the plan's `evaluation.keep`"
    )
    parser.add_argument("--round", metavar="N", help=f"{help_}; for a plan with sites also G.E, as in `explain`")
    help_ = "shape of one input; default: from the plan's data, or else the model's default"
    parser.add_argument("--example", type=int, nargs="+", default=[], metavar="N", help=help_)


def export(options: argparse.Namespace) -> int:
    """Write a run's model as one file.

    Raises:
        ConfigError: The run has no such model, or it cannot be exported in this format.
    """
    processes.configure("warning", options.verbose)
    with loading():
        from edge_server.release.export import SUFFIXES, export_model  # noqa: PLC0415

    model = _read(options)
    source = model.source
    out = options.out or Path(f"{source.run}-round-{source.round}{SUFFIXES[options.format]}")
    written = export_model(model, options.format, out)
    if options.json:
        _print_json(written)
        return 0
    like = "" if written.error is None else f", within {written.error:.1e} of PyTorch"
    size = _bytes(written.size)
    sys.stdout.write(f"{source.run}, round {source.round}{_accuracy(model)}: {size}{like}\n{written.file}\n")
    if model.preprocessing.mean or model.preprocessing.std:
        sys.stdout.write(f"inputs: {_format_preprocessing(model.preprocessing)}; prepare them so before a call\n")
    return 0


def _read(options: argparse.Namespace, *, is_exact: bool = False) -> RunModel:
    """Return the requested model; with `is_exact`, refuse other code of its network than at the run's beginning."""
    from edge_server.journal.runs import find_run  # noqa: PLC0415
    from edge_server.plan.sites import parse_round  # noqa: PLC0415
    from edge_server.release.run_model import read_model  # noqa: PLC0415
    from edge_server.rounds.plugins import changed_network_code  # noqa: PLC0415

    if any(size < 1 for size in options.example):
        raise ConfigError("--example: use numbers from 1")
    if options.config:
        from edge_server.plan.server_config import load, plugin_entries  # noqa: PLC0415

        registry.allow([*registry.allowed_entries(), *plugin_entries(load(options.config))])
    run = find_run(options.data_dir, options.run)
    if is_exact and run.opened and (changes := changed_network_code(run.opened)):
        raise ConfigError(f"{changes}; restore it, so that boards serve the trained network, or use edge-server export")
    sites = run.opened.plan.sites if run.opened else UNSET
    number = None if options.round is None else parse_round(options.round, sites)
    model = read_model(run, number, options.example)
    if model.source.personal:
        log.warning("devices of %s use personal models; this is the server's model", model.source.algorithm.name)
    return model


def _accuracy(model: RunModel) -> str:
    figure = _format_metric(model.source.accuracy, model.task)
    return "" if figure == "-" else f", {'' if model.task else 'accuracy '}{figure}"


def _format_metric(accuracy: float | None, task: ReleaseTask | UnsetType) -> str:
    """Return the compared metric of a release: an accuracy without its name, others with it."""
    if not task:
        return _figure(accuracy)
    name = task.metrics[0]
    return f"{name} {task.values[name]:.4g}" if name in task.values else "-"


def release_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `release` and its verbs."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    create = add_command(verbs, "create", "create a release of a run's model")
    _model_arguments(create)
    create.add_argument(
        "--name", metavar="NAME", help="name of the release, by which applications request it; default: the plan's name"
    )
    help_ = "also export two graphs, below and above CUT; default: the cut of the run, else the model's first"
    create.add_argument("--halves", type=int, nargs="?", const=0, metavar="CUT", help=help_)
    _reduction_arguments(create)
    listing = add_command(verbs, "list", "list the releases of a site")
    show = add_command(verbs, "show", "show a release and verify its files")
    out = add_command(
        verbs, "export", "write a release to a folder: manifest, graphs, parameters, and test inputs with their outputs"
    )
    delete = add_command(verbs, "delete", "delete releases, and the files that no other release uses")
    for verb in (show, out):
        verb.add_argument("release", metavar="RELEASE", help=RELEASE)
    out.add_argument("folder", type=Path, metavar="DIR", help="new folder")
    delete.add_argument(
        "releases", nargs="+", metavar="NAME/VERSION", help="release to delete; its version number is never used again"
    )
    delete.add_argument(
        "--force",
        action="store_true",
        help="delete the release even if a board's latest report says that the board uses it",
    )
    for verb in (create, listing, show):
        folders.add_options(verb, form=True)
    for verb in (out, delete):
        folders.add_options(verb)


def _reduction_arguments(create: argparse.ArgumentParser) -> None:
    smaller = create.add_mutually_exclusive_group()
    help_ = "quantize weights and activations to 8 bits, calibrated and evaluated on the server's examples"
    smaller.add_argument("--int8", action="store_true", help=help_)
    help_ = "send weights as 16-bit floats, which boards expand"
    smaller.add_argument("--float16", action="store_true", help=help_)
    help_ = (
        "with --int8 or --float16: create no release if accuracy drops by more than X, or if an error such as rmse "
        "rises by more than the share X of its value; default: 0.01"
    )
    create.add_argument("--max-drop", type=float, metavar="X", help=help_)


def release(options: argparse.Namespace) -> int:
    """Create, list, show, export or delete releases.

    Raises:
        ConfigError: There is no such run, model or release, or it cannot be exported.
        CorruptFile: A part of the release is damaged.
    """
    from edge_server.release import store  # noqa: PLC0415

    processes.configure("warning", options.verbose)
    match options.verb:
        case "create":
            _show_release(options, _create(options))
        case "list":
            _list_releases(options)
        case "show":
            stored = store.find_release(options.data_dir, options.release)
            store.verify(stored)
            _show_release(options, stored)
        case "export":
            stored = store.find_release(options.data_dir, options.release)
            store.export_release(stored, options.folder)
            sys.stdout.write(f"{stored.manifest.reference}: {options.folder}\n")
        case _:
            for text in options.releases:
                if not options.force:
                    _require_unused(options.data_dir, text)
                freed = store.delete_release(options.data_dir, text)
                sys.stdout.write(f"deleted {text} ({_bytes(freed)})\n")
    return 0


def serve_tops(options: argparse.Namespace) -> int:
    """Serve the upper halves of a site's releases until a signal arrives.

    Raises:
        ConfigError: The file is invalid, or another process serves them.
    """
    from edge_server.plan.server_config import load  # noqa: PLC0415
    from edge_server.release.top_server.service import serve_site  # noqa: PLC0415

    config = load(options.config)
    processes.configure(config.log_level, options.verbose)
    asyncio.run(_until_signalled(serve_site(config)))
    return 0


async def _until_signalled(serving: Coroutine[Any, Any, None]) -> None:
    """Await a coroutine; SIGTERM and SIGINT cancel it."""
    task = asyncio.ensure_future(serving)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        async with notify_supervisor():
            await task


def _require_unused(data_dir: Path, text: str) -> None:
    from edge_server.release.rollout.orders import require_unused  # noqa: PLC0415

    require_unused(data_dir, text)


def _create(options: argparse.Namespace) -> StoredRelease:
    with loading():
        from edge_server.release.create import MAX_DROP, ReductionOptions, create_release  # noqa: PLC0415

    if options.max_drop is not None and not (options.int8 or options.float16):
        raise ConfigError("--max-drop needs --int8 or --float16")
    if options.max_drop is not None and not 0 <= options.max_drop <= 1:
        raise ConfigError("--max-drop: use a share from 0 to 1")
    model = _read(options, is_exact=True)
    smaller, drop = None, MAX_DROP if options.max_drop is None else options.max_drop
    if options.int8 or options.float16:
        smaller = ReductionOptions("int8" if options.int8 else "float16", drop)
    return create_release(
        model, options.data_dir, model.plan.name if options.name is None else options.name, options.halves, smaller
    )


def _list_releases(options: argparse.Namespace) -> None:
    from edge_server.release.store import list_releases  # noqa: PLC0415

    manifests = [stored.manifest for stored in list_releases(options.data_dir)]
    if options.format == "json":
        _print_json([_summary(manifest) for manifest in manifests])
        return
    metric = "metric" if any(manifest.task for manifest in manifests) else "accuracy"
    columns = (
        *(TextColumn("release"), TextColumn("run"), TextColumn("round", right=True), TextColumn("model")),
        *(TextColumn(metric, right=True), TextColumn("parameters", right=True), TextColumn("created")),
    )
    rows = [
        (
            *(manifest.reference, manifest.source.run, str(manifest.source.round), manifest.model.name),
            *(
                _format_metric(manifest.source.accuracy, manifest.task),
                _bytes(manifest.parameters.size),
                manifest.created,
            ),
        )
        for manifest in manifests
    ]
    write_text(sys.stdout, TextTable(columns, rows))


def _summary(manifest: ReleaseManifest) -> dict[str, object]:
    """Return the JSON summary of a release."""
    source = {name: getattr(manifest.source, name) for name in ("run", "round", "accuracy", "personal")}
    if manifest.task:
        source |= {"metric": manifest.task.metrics[0], "value": manifest.task.values.get(manifest.task.metrics[0])}
    sizes = {"parameters_bytes": manifest.parameters.size, "graph_sha256": manifest.graph.part.sha256}
    return {"release": manifest.reference, **source, "model": manifest.model.name, **sizes, "created": manifest.created}


def _show_release(options: argparse.Namespace, stored: StoredRelease) -> None:
    """Print a release; its JSON is the manifest and the manifest's digest."""
    manifest = stored.manifest
    if options.format == "json":
        _print_json({"release": manifest.reference, "sha256": stored.sha256, "manifest": manifest})
        return
    source, graph, prepared = manifest.source, manifest.graph, manifest.preprocessing
    rows = {
        "release": manifest.reference,
        "manifest": stored.sha256,
        "created": manifest.created,
        "run": f"{source.run}, round {source.round}, {source.algorithm.name}" + ", personal" * source.personal,
        **_metric_rows(manifest),
        "model": " ".join([manifest.model.name, *(f"{key}={value}" for key, value in manifest.model.options.items())]),
        "input": f"{graph.input.name}, {graph.input.dtype}, {_shape(graph.input.shape)}",
        "output": f"{graph.output.name}, {graph.output.dtype}, {_shape(graph.output.shape)}",
        "preprocessing": _format_preprocessing(prepared),
        "classes": ", ".join(manifest.classes) or "numbers",
        "format": f"ONNX opset {manifest.opset}, IR version {manifest.ir_version}",
    }
    if manifest.reduction:
        rows["reduction"] = _format_reduction(manifest.reduction)
    if manifest.halves:
        rows["halves"] = f"at cut {manifest.halves.cut}, features {_shape(manifest.halves.top.input.shape)}"
    rows |= {name: f"{_bytes(part.size)}, {part.sha256}" for name, part in manifest.parts.items()}
    write_text(sys.stdout, TextTable((TextColumn(""), TextColumn("", least=24)), list(rows.items())))


def _metric_rows(manifest: ReleaseManifest) -> dict[str, str]:
    """Return the accuracy of a release, or kind and metrics of another task than a classification."""
    task, where = manifest.task, manifest.source.measured_on
    if not task:
        return {"accuracy": f"{_figure(manifest.source.accuracy)} on {where}" if where else "-"}
    values = ", ".join(f"{name} {value:.4g}" for name, value in task.values.items())
    return {"task": task.kind, "metrics": f"{values} on {where}" if values and where else ", ".join(task.metrics)}


def _format_reduction(reduction: Reduction) -> str:
    """Describe how a release was reduced, and the effects."""
    timings = (reduction.seconds_before, reduction.seconds_after)
    times = [] if None in timings else [" for ".join(f"{1e3 * s:.3g} ms" for s in reversed(timings) if s)]
    name, figures = "accuracy", (reduction.accuracy, reduction.accuracy_before)
    if reduction.metric and reduction.value is not UNSET and reduction.value_before is not UNSET:
        name, figures = reduction.metric, (reduction.value, reduction.value_before)
    accuracy = f"{name} {' for '.join(map(_figure, figures))} on {reduction.examples} examples"
    sizes = f"parameters {_bytes(reduction.bytes_after)} for {_bytes(reduction.bytes_before)}"
    return ", ".join([reduction.kind, accuracy, sizes, *times])


def _format_preprocessing(preprocessing: Preprocessing) -> str:
    """Describe the preprocessing of the training examples."""
    if preprocessing.mean is None or preprocessing.std is None:
        return "set by each device's configuration"
    match preprocessing.dtype:
        case "uint8":
            done = [f"bytes divided by {preprocessing.byte_scale:g}"]
        case "float32":
            done = ["numbers as they are"]
        case _:
            done = [f"bytes divided by {preprocessing.byte_scale:g}, other numbers as they are"]
    done += [f"less {', '.join(f'{value:g}' for value in preprocessing.mean)}"] if preprocessing.mean else []
    done += [f"divided by {', '.join(f'{value:g}' for value in preprocessing.std)}"] if preprocessing.std else []
    done += [f"of columns {format_class_names(preprocessing.features)}"] if preprocessing.features else []
    return ", ".join(done)


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join("batch" if extent < 0 else str(extent) for extent in shape)


def _figure(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{accuracy:.4f}"


def _bytes(count: int) -> str:
    unit = choose_unit(count, BYTES, between=("GB", "kB"))
    return f"{count / unit.size:.1f} {unit.name}"


def _print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")
