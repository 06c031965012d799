"""Put a live agent together from its file."""

from __future__ import annotations

from pathlib import Path

from device_agent.agent import Agent, Trainer
from device_agent.config import AgentConfig
from device_agent.delivery import Delivery
from device_agent.download import Download
from device_agent.outbox import Outbox
from shared.clock import monotonic
from shared.messages import Report
from shared.transport.base import Transport
from shared.worker import in_thread


def compose(config: AgentConfig, folder: Path, transport: Transport, trainer: Trainer) -> Agent:
    """Return the agent that a file describes, on the given transport and trainer."""
    outbox = Outbox(folder / "outbox", folder / "state")
    return Agent(
        device=config.device,
        site=config.site,
        transport=transport,
        clock=monotonic,
        trainer=trainer,
        outbox=outbox,
        download=Download(
            transport,
            *(config.site, config.device, folder, in_thread, monotonic),
            window=config.link.window,
            patience_s=config.link.patience_s,
            limit=config.link.max_payload_mb << 20,
        ),
        delivery=Delivery(transport, config.site, config.device, outbox),
        data=config.data,
        states=folder / "state",
        frame_bytes=config.link.frame_bytes,
        report_s=config.report_s,
        sense=lambda: Report(device=config.device, at=monotonic()),
    )
