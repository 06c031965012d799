"""Energy prediction of a task in joules, as charged by the ledger.

Joules are those of the whole device, idle power included.
The watts of a part are those of the newest task that reported its joules and seconds; before the first such task, those
of the plan, and for a transfer at least the idle watts. Where a device has reported tasks but never the energy of that
part, the part has no figure: the ledger does not charge it either.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from edge_server.allocation.device_facts import DeviceFacts
from edge_server.allocation.figures import Estimate
from edge_server.allocation.options import MeasuringOptions
from edge_server.journal.decision import Figure
from edge_server.plan.devices import DevicePlan
from edge_server.plan.simulated_devices import CyclesPower, GivenPower, range_ends
from shared.protocol.measurements import Cost


def joule_estimates(device: DeviceFacts, options: MeasuringOptions) -> dict[str, Estimate]:
    """Return estimates of transfer watts, and the correction factor of predicted joules."""
    transfer_w = _planned_transfer_w(device.planned)
    estimates = {
        "upload_w": _transfer_w(
            device, device.last_upload.cost if device.last_upload else None, "upload", transfer_w[0]
        ),
        "download_w": _transfer_w(device, device.task.cost if device.task else None, "download", transfer_w[1]),
    }
    if options.calibrated and "joules_error" in device.errors:
        estimates["joules_error"] = Estimate(device.errors["joules_error"])
    return estimates


def compute_w_estimate(device: DeviceFacts) -> Estimate:
    """Return an estimate of a device's watts while it trains."""
    power = device.planned.power if device.planned else None
    task, timed = device.task.cost if device.task else Cost(), device.timed
    measured = _watts(task.compute_joules, task.compute_s)
    if measured is None and timed is not None:
        measured = _watts(timed.joules, timed.seconds)
    return Estimate(measured, profile=power.busy_w if isinstance(power, GivenPower) else None)


def _transfer_w(device: DeviceFacts, cost: Cost | None, way: str, planned_w: float | None) -> Estimate:
    if cost is None:
        idle_w = planned_w if planned_w is not None else _idle_w(device)
        return Estimate(None, profile=planned_w, default=idle_w)
    joules, seconds = (getattr(cost, f"{way}_{unit}") for unit in ("joules", "s"))
    return Estimate(_watts(joules, seconds))


def _watts(joules: float | None, seconds: float | None) -> float | None:
    return None if joules is None or not seconds else joules / seconds


def _idle_w(device: DeviceFacts) -> float | None:
    if device.task and device.task.cost.idle_w is not None:
        return device.task.cost.idle_w
    return device.timed.idle_w if device.timed else None


def _planned_transfer_w(planned: DevicePlan | None) -> tuple[float | None, float | None]:
    """Return the plan's watts of a device while it sends and while it receives; None if not given."""
    match planned.power if planned else None:
        case GivenPower() as power:
            return power.tx_w, power.rx_w
        case CyclesPower() as power:
            tx_w = None if power.tx_w is None else power.idle_w + sum(range_ends(power.tx_w)) / 2
            return tx_w, None if power.rx_w is None else power.idle_w + power.rx_w
        case _:
            return None, None


def work_estimates(device: DeviceFacts) -> dict[str, Estimate]:
    """Return estimates of compute watts, and of download joules, which no decision changes."""
    measured = device.task.cost.download_joules if device.task else None
    return {"compute_w": compute_w_estimate(device), "download_joules": Estimate(measured)}


def add_joules(predicted: Cost, figures: Mapping[str, Figure], compute: float | None, download: float | None) -> Cost:
    """Return the predicted cost with joules, corrected by earlier prediction errors.

    Args:
        compute: Uncorrected joules of computing; None if unknown.
        download: Uncorrected joules of the download; None if unknown.
    """
    error, upload = figures.get("joules_error"), scale_figure(figures.get("upload_w"), predicted.upload_s)
    parts = [
        None if device is None else device * (error.value if error else 1.0) for device in (download, compute, upload)
    ]
    return msgspec.structs.replace(predicted, download_joules=parts[0], compute_joules=parts[1], upload_joules=parts[2])


def scale_figure(figure: Figure | None, amount: float | None) -> float | None:
    """Multiply a figure by an amount; None if either is unknown."""
    return None if figure is None or amount is None else figure.value * amount
