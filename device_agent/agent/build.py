"""Build an agent from its configuration."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

from device_agent.agent.job_settings import JobSettings
from device_agent.agent.lifecycle import Agent
from device_agent.config import AgentConfig
from device_agent.exchange.download import Download
from device_agent.exchange.outbox import Outbox
from device_agent.exchange.reports import Charge, Reporter
from device_agent.exchange.split_session import SplitSessions
from device_agent.exchange.upload import Delivery
from device_agent.exchange.upload_meter import UploadMeter
from device_agent.measurement.board import Board
from device_agent.measurement.link_meter import LinkMeter
from device_agent.measurement.task_meter import charge_transfer
from device_agent.trainer.interface import Trainer
from shared.protocol.messages import Report
from shared.runtime.clock import Clock, monotonic
from shared.runtime.executor import Worker, in_thread
from shared.transport.base import Transport


def compose(  # noqa: PLR0913 - the seams that replay exchanges
    config: AgentConfig,
    folder: Path,
    transport: Transport,
    trainer: Trainer,
    *,
    clock: Clock = monotonic,
    worker: Worker = in_thread,
    board: Board | None = None,
    link: LinkMeter | None = None,
    charge: Charge | None = None,
    seed: int | None = None,
) -> Agent:
    """Compose the agent of a configuration.

    Args:
        folder: Parent of its outbox, states and downloads.
        worker: Runs blocking calls off the event loop.
        board: Measures the board; None in replay.
        link: Measures the link from its traffic; None for a new meter.
        charge: Computes the cost of transfers; None to use the board's power log.
        seed: Seed of the offers' jitter; None for a random one.
    """
    site, device, meter = config.site, config.device, link or LinkMeter(clock=clock)
    sense, power = partial(_make_report, device, board, meter, folder, clock), board.power if board else None
    reporter = Reporter(transport, site, device, clock, worker, sense=sense, report_s=config.report_s, power=power)
    emulated = config.board.emulated  # its transfers have fixed costs; else the board's power log measures them
    reporter.charge = charge or (partial(charge_transfer, emulated) if emulated else None)
    uploads = UploadMeter(clock, meter, reporter.note_upload_start, reporter.note_upload)
    jitter = partial(Random, seed)  # spreads offers in time
    outbox = Outbox(folder / "outbox", folder / "state", config.outbox_mb << 20)
    return Agent(
        device=device,
        site=site,
        transport=transport,
        clock=clock,
        trainer=trainer,
        outbox=outbox,
        download=_make_download(config, folder, transport, meter, worker, clock),
        delivery=Delivery(transport, site, device, outbox, jitter(), uploads=uploads),
        splitting=SplitSessions(transport, site, device, clock, config.link.policy, jitter()),
        settings=JobSettings(
            config.examples, folder / "state", config.link.frame_bytes, board.measuring if board else None
        ),
        reporter=reporter,
    )


def compose_reporter(
    config: AgentConfig, folder: Path, transport: Transport, board: Board, link: LinkMeter
) -> Reporter:
    """Compose the reports of a board that takes no tasks.

    Args:
        link: Measures the link from its traffic.
    """
    sense = partial(_make_report, config.device, board, link, folder, monotonic)
    return Reporter(
        transport=transport,
        site=config.site,
        device=config.device,
        clock=monotonic,
        worker=in_thread,
        sense=sense,
        report_s=config.report_s,
        power=board.power,
        charge=None,
    )


def _make_download(
    config: AgentConfig, folder: Path, transport: Transport, link: LinkMeter, worker: Worker, clock: Clock
) -> Download:
    return Download(
        transport,
        config.site,
        config.device,
        folder,
        worker,
        clock,
        policy=config.link.policy,
        link=link,
    )


def compose_bundle_download(config: AgentConfig, folder: Path, transport: Transport, spool: str) -> Download:
    """Compose the download of a rollout's parts into a file `spool`."""
    download = _make_download(config, folder, transport, LinkMeter(), in_thread, monotonic)
    return replace(download, spool=spool, frames_on="parts", wants_on="lacks")


def _make_report(device: str, board: Board | None, link: LinkMeter, folder: Path, clock: Clock) -> Report:
    return board.report(device, link, folder) if board else Report(device=device, at=clock())
