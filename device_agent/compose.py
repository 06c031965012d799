"""Put an agent together from what its file says."""

from __future__ import annotations

from pathlib import Path
from random import Random

from device_agent.agent import Agent, Trainer
from device_agent.config import AgentConfig
from device_agent.delivery import Delivery
from device_agent.download import Download
from device_agent.outbox import Outbox
from shared.clock import Clock, monotonic
from shared.messages import Report
from shared.transport.base import Transport
from shared.worker import Worker, in_thread


def compose(  # noqa: PLR0913 - the seams that replay exchanges
    config: AgentConfig,
    folder: Path,
    transport: Transport,
    trainer: Trainer,
    *,
    clock: Clock = monotonic,
    worker: Worker = in_thread,
    seed: int | None = None,
) -> Agent:
    """Return the agent that a configuration describes.

    Args:
        config: What its file says.
        folder: Where its outbox, its states and what it receives lie.
        transport: Its way to the broker.
        trainer: Does its tasks.
        clock: Time.
        worker: Runs what would block.
        seed: Of the jitter of its offers; None for another one every time.
    """
    outbox = Outbox(folder / "outbox", folder / "state", config.outbox_mb << 20)
    return Agent(
        device=config.device,
        site=config.site,
        transport=transport,
        clock=clock,
        trainer=trainer,
        outbox=outbox,
        download=Download(
            *(transport, config.site, config.device, folder, worker, clock),
            window=config.link.window,
            patience_s=config.link.patience_s,
            limit=config.link.max_payload_mb << 20,
        ),
        delivery=Delivery(transport, config.site, config.device, outbox, jitter=Random(seed)),  # noqa: S311 - no secret
        data=config.data,
        states=folder / "state",
        frame_bytes=config.link.frame_bytes,
        report_s=config.report_s,
        sense=lambda: Report(device=config.device, at=clock()),
    )
