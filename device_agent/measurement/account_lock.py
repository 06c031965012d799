"""Lock that prevents a second broker connection with this board's account.

A broker with accounts may drop the first connection when a second one arrives. So only the agent connects by account
while it runs, and it cannot start while another tool is connected.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from device_agent.config import AgentConfig
from shared.runtime.folder_lock import FOLDER_LOCK

IN_USE = (
    "the agent is connected with this board's account, and a second connection would end its own: stop the agent first"
)


@contextmanager
def block_agent_connection(config: AgentConfig) -> Iterator[bool]:
    """Keep the agent from connecting during the block; yield whether a connection is safe.

    Args:
        config: Configuration of the agent. Without a broker account a connection is always safe.
    """
    if not config.broker.has_account:
        yield True
        return
    try:
        file = (Path(config.state_dir) / FOLDER_LOCK).open("rb")
    except FileNotFoundError:  # no agent has ever run
        yield True
        return
    except OSError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
