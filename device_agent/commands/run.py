"""`device-agent run`: connect to the site's broker and serve tasks until stopped."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from device_agent.agent.build import compose, compose_bundle_download, compose_reporter
from device_agent.agent.lifecycle import Agent
from device_agent.config import AgentConfig, TargetConfig, load
from device_agent.exchange.agent_offers import AgentOffers, InstalledVersion
from device_agent.exchange.owner import claim
from device_agent.exchange.state_files import ensure_writable
from device_agent.hardware.tools import run_module
from device_agent.identity.clock_floor import BoardClock
from device_agent.identity.credentials import CURRENT, FOLDER, read_membership
from device_agent.measurement.board import Board, load_measuring, open_board
from device_agent.measurement.link_meter import LinkMeter
from device_agent.measurement.tuning.apply import JOURNAL_NAME, hold_settings
from device_agent.measurement.tuning.plan import Target
from device_agent.projects.environment import export_plugins
from device_agent.projects.provide import Projects
from device_agent.trainer.process import TrainerOptions, TrainerProcess
from device_agent.trainer.processor_share import choose_share, choose_trainer_device, format_share
from device_agent.upgrade.proof import TrialReporter, mark_busy
from device_agent.upgrade.record import find_versions_folder, running_version
from device_agent.upgrade.state_formats import check_formats
from shared.data.classes import class_names
from shared.data.inputs import read_preparation
from shared.data.spec import Data, require_class_names
from shared.errors import ConfigError, Unwritable
from shared.protocol.inputs import Inputs
from shared.runtime import backports, malloc, processes
from shared.runtime.command_line import add_config
from shared.runtime.executor import background, in_thread
from shared.runtime.folder_lock import hold_lock, keep_lock
from shared.runtime.interpreter import Interpreter, find_interpreter
from shared.runtime.service import notify_supervisor
from shared.transport.mqtt import MqttTransport
from shared.transport.presence import SERVES, Session

if TYPE_CHECKING:  # keeps an agent that only trains small
    from device_agent.commands.serving import BoardServing

TORCH_CHECK_S = 60.0
INSTANCE_BYTES = 16
"""Size of this process's random instance name."""
logger = logging.getLogger(__name__)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_config(parser, "agent.toml", "the agent's TOML file, see device_agent/REFERENCE.md")


def run(options: argparse.Namespace) -> int:
    """Run the agent until SIGTERM or SIGINT."""
    config = load(options.config)
    processes.configure(config.log_level, options.verbose)
    processes.keep_private()
    malloc.tune()
    malloc.share_arena()
    backports.run(serve(config))
    return 0


@dataclass(frozen=True)
class AgentEvents:
    """Events that occur once in an agent's life.

    Attributes:
        reported: Set when the broker accepted the first report.
    """

    stopping: asyncio.Event
    reported: asyncio.Event


async def serve(config: AgentConfig) -> None:
    """Run the agent until SIGTERM or SIGINT, then clean up."""
    folder = ensure_writable(Path(config.state_dir), "name a folder this user may write")
    export_plugins(config.trainer.plugin_entries, config.trainer.projects, folder)
    serving = _compose_serving(config, folder)
    stopping, home = asyncio.Event(), find_versions_folder()
    trial = TrialReporter(home, folder, running_version(home) if home else "")
    events = AgentEvents(stopping, trial.report_accepted)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    with hold_lock(folder) as lock:
        check_formats(folder)
        claim(folder, config.device)
        beside = serving.coroutines() if serving else []
        async with notify_supervisor(), background(keep_lock(lock), trial.run(), _trim_memory(events), *beside):
            if serving and config.data is None:
                logger.info("this board serves models only: its file has no [data]")
                await _serve_models_only(config, folder, serving, events)
            else:
                await _serve_tasks(config, folder, serving, events)
    logger.info("stopped")


async def _trim_memory(events: AgentEvents) -> None:
    """Release memory of the start-up phase once the agent is idle."""
    await events.reported.wait()
    malloc.trim_heap()


def _compose_serving(config: AgentConfig, folder: Path) -> BoardServing | None:
    """Compose model serving; None without `[serve]`."""
    if config.serve is None:
        return None
    from device_agent.commands.serving import compose_serving  # noqa: PLC0415 - see above

    return compose_serving(config, config.serve, folder)


async def _serve_models_only(config: AgentConfig, folder: Path, serving: BoardServing, events: AgentEvents) -> None:
    """Report and take part in rollouts until stopped; such a board receives no tasks."""
    session = Session(
        folder / "session", config.device, config.site, os.urandom(INSTANCE_BYTES).hex(), trains=False, state=SERVES
    )
    board = open_board(load_measuring(config.board, folder))
    with _hold_target(config.board.target, board, folder), board.power or nullcontext():
        async with _make_transport(config, folder, session).running() as transport:
            reporter = compose_reporter(config, folder, transport, board, LinkMeter(transport.traffic))
            reporter.instance, reporter.published = session.instance, events.reported
            releases = serving.run_releases(transport, session.instance)
            renewing = _compose_renewal(config, folder)
            tops = serving.connect_tops(transport, session.instance)
            upgrades = _compose_upgrades(config, folder, transport, session.instance)
            async with background(reporter.run(), releases, upgrades.run(), *renewing), tops:
                await events.stopping.wait()


def _compose_upgrades(config: AgentConfig, folder: Path, transport: MqttTransport, instance: str) -> AgentOffers:
    """Compose this board's part in rollouts of the agent."""
    download = compose_bundle_download(config, folder, transport, "agent")
    home = find_versions_folder()
    return AgentOffers(download, folder, InstalledVersion(home, running_version(home) if home else ""), instance)


def _make_transport(config: AgentConfig, folder: Path, session: Session) -> MqttTransport:
    """Create the MQTT transport; certificate dates are checked if this board's clock is reliable."""
    name, clock = f"{config.site}.{config.device}", BoardClock.of(folder)
    return MqttTransport(config.broker, name, session.presence, dates=clock.may_judge)


def _compose_renewal(config: AgentConfig, folder: Path) -> list[Coroutine[Any, Any, None]]:
    """Compose certificate renewal; empty for a board that did not join with a token."""
    if read_membership(folder / FOLDER / CURRENT) is None:
        return []
    from device_agent.identity.renewal import Renewal, show_certificate  # noqa: PLC0415 - a site without tokens needs none

    clock = BoardClock.of(folder)
    return [Renewal(folder, clock, partial(show_certificate, clock=clock), config.broker).run()]


async def _serve_tasks(config: AgentConfig, folder: Path, serving: BoardServing | None, events: AgentEvents) -> None:
    """Serve tasks of the site's server until stopped."""
    data = config.examples
    _require_examples(data)
    classes, inputs = await in_thread(_class_names, data), await in_thread(_inputs, data)
    trains = config.trainer.trains and await in_thread(_has_torch, config.trainer.python)
    if not trains:
        logger.info("this board does not train; it evaluates rounds with ONNX Runtime if the plan allows")
    instance = os.urandom(INSTANCE_BYTES).hex()
    session = Session(
        folder / "session", config.device, config.site, instance, classes=classes, inputs=inputs, trains=trains
    )
    board = open_board(load_measuring(config.board, folder))
    share = choose_share(config.trainer, board.profile, os.sched_getaffinity(0), serves=serving is not None)
    if serving:
        logger.info("%s", format_share(share))
    options = TrainerOptions(
        memory_mb=config.trainer.memory_mb,
        threads=config.trainer.threads,
        log_level=config.log_level,
        plugins=config.trainer.plugin_entries,
        device=choose_trainer_device(config.trainer, board.profile),
        nice=share.nice,
        cpus=share.cpus,
        python=config.trainer.python,
    )
    projects = serving.projects if serving else Projects(folder, config.trainer.projects, data.source)
    trainer = TrainerProcess(folder / "trainer.lock", config.trainer.idle_s, options, trains=trains, projects=projects)
    with _hold_target(config.board.target, board, folder), board.power or nullcontext():
        await _run_agent(config, board, session, trainer, serving, events)


def _has_torch(python: str) -> bool:
    """Return True if the trainer's interpreter has torch; warn about a missing interpreter."""
    try:
        interpreter = find_interpreter(python)
    except ConfigError as error:
        logger.warning("%s", error)
        return False
    if interpreter == Interpreter():
        return find_spec("torch") is not None
    return run_module("device_agent.trainer.has_torch", timeout_s=TORCH_CHECK_S, interpreter=interpreter).exit_code == 0


def _require_examples(data: Data) -> None:
    """Warn about unreadable examples now: the first task that needs them may be hours away."""
    if data.path and not os.access(data.path, os.R_OK):
        remedy = "correct `path` of [data] or let the agent's user read it"
        logger.warning("data.path %s does not exist or is not readable, so tasks fail; %s", data.path, remedy)


def _class_names(data: Data) -> tuple[str, ...] | None:
    """Return the device's class names; None if it reads no labels or, with a warning, no examples yet."""
    try:
        names = class_names(data)
        if names:
            require_class_names(names)
    except (ConfigError, ValueError) as error:
        logger.warning("class names are not reported to the server: %s", error)
        return None
    return names


def _inputs(data: Data) -> Inputs | None:
    """Return the device's input preparation; None, with a warning, if its examples cannot be read yet."""
    try:
        return read_preparation(data)
    except (ConfigError, ValueError) as error:
        logger.warning("input preparation is not reported to the server: %s", error)
        return None


async def _run_agent(
    config: AgentConfig,
    board: Board,
    session: Session,
    trainer: TrainerProcess,
    serving: BoardServing | None,
    events: AgentEvents,
) -> None:
    folder = Path(config.state_dir)
    async with _make_transport(config, folder, session).running() as transport:
        agent = compose(config, folder, transport, trainer, board=board, link=LinkMeter(transport.traffic))
        agent.reporter.instance, agent.reporter.published = session.instance, events.reported
        agent.busy = partial(mark_busy, folder)
        if serving and serving.own:
            agent.settings.keeps_own, agent.outbox.own_changed = True, serving.own.changed.set
            serving.own.changed.set()  # an earlier agent's trainer may have left a model
        releases = [serving.run_releases(transport, session.instance)] if serving else []
        upgrades = _compose_upgrades(config, folder, transport, session.instance)
        beside = [*releases, upgrades.run(), *_compose_renewal(config, folder)]
        running = asyncio.create_task(_run_beside(agent, beside), name="agent")
        stop = asyncio.create_task(events.stopping.wait(), name="stop")
        try:
            async with serving.connect_tops(transport, session.instance) if serving else nullcontext():
                await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.cancel()
            stop.cancel()
            await trainer.close()  # the agent task waits for its trainer, which may block in a library
            results = await asyncio.gather(running, return_exceptions=True)
            await trainer.close()  # a trainer started meanwhile
    if isinstance(results[0], Exception):
        raise results[0]


async def _run_beside(agent: Agent, beside: Sequence[Coroutine[Any, Any, None]]) -> None:
    async with background(*beside):
        await agent.run()


@contextmanager
def _hold_target(target: TargetConfig, board: Board, folder: Path) -> Iterator[None]:
    """Keep the board's clocks and power mode at the target while the agent runs; failures are warnings."""
    with ExitStack() as stack:
        try:
            goal = Target(power_mode=target.power_mode, governor=target.governor, max_hertz=target.max_hertz)
            stack.enter_context(hold_settings(board.root, board.profile, goal, folder / JOURNAL_NAME))
        except (ConfigError, Unwritable) as error:
            logger.warning("clocks and power mode unchanged: %s", error)
        yield
