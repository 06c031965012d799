"""Run the cells of a study on an existing Ray cluster.

Ray is an extra, imported only here.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from edge_server.journal.runs import read_versions
from edge_server.replay.study.cell import run_remote_cell
from edge_server.replay.study.pool import Tell, await_all
from edge_server.replay.study.result import CellEnded, CellStarted, Order
from shared.errors import ConfigError
from shared.runtime.extras import install_command

# Oldest Ray version accepted; tests ran with 2.60.
OLDEST = (2, 40)

GRACE_S = 5.0
# Cells submitted per processor of the cluster, so that none runs idle.
AHEAD = 2


async def run_on_ray(address: str, orders: Sequence[Order], jobs: int, tell: Tell) -> None:
    """Run cells on a cluster; its nodes need this program, the same versions, and data at the same paths.

    Args:
        address: Address of the cluster; `auto` for the one on this machine.
        orders: Cells; their files are copied back to the folders in the orders.
        jobs: Maximum number of submitted cells; 0 to derive it from the cluster's processors.

    Raises:
        ConfigError: Ray is missing, too old or different from the cluster's version, or there is no cluster.
    """
    ray = _ray()
    _connect(ray, address)
    try:
        remote_perform = ray.remote(num_cpus=1, max_retries=0)(run_remote_cell)
        slots = asyncio.Semaphore(jobs or max(1, AHEAD * int(ray.cluster_resources().get("CPU", 1))))
        await await_all([_run(ray, remote_perform, order, slots, tell) for order in orders])
    finally:
        ray.shutdown()


async def _run(ray: Any, remote_perform: Any, order: Order, slots: asyncio.Semaphore, tell: Tell) -> None:
    async with slots:
        tell(CellStarted(order.cell, None))
        reference = remote_perform.remote(msgspec.json.encode(order), read_versions())
        cause = ""
        try:
            files = await reference
        except ray.exceptions.RayError as error:
            cause = str(error).strip().rpartition("\n")[2]
        except asyncio.CancelledError:
            ray.cancel(reference)
            with suppress(ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(GRACE_S):  # time to remove temporary files; then the cluster kills it
                    await reference
            raise
        else:
            for name, data in files.items():
                path = Path(order.place) / order.cell / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        tell(CellEnded(order.cell, cause))


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:  # RuntimeError: the cluster's Ray or Python differs
        cause = " ".join(str(error).split())
        raise ConfigError(f"--ray {address}: {cause}; start one with `ray start --head`, or leave --ray out") from error


def _ray() -> Any:
    try:
        import ray  # noqa: PLC0415
    except ImportError as error:
        requirement = f"this is Python {platform.python_version()}, for which Ray must have a package"
        raise ConfigError(f"--ray needs Ray ({error}); {install_command('ray')}; {requirement}") from error
    if tuple(map(int, ray.__version__.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"--ray: Ray {ray.__version__} is too old; install {oldest} or later here and on the cluster")
    return ray
