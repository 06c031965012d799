"""Who may ask whether a broker serves this board, so that the agent's own connection loses nothing by it.

A broker that knows a board by an account may take its second connection for the end of the first. So nobody but the
agent connects by an account while the agent runs, and the agent does not begin to meanwhile.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from device_agent.config import AgentConfig
from shared.runtime.folder_lock import FOLDER_LOCK

IN_USE = (
    "the agent is connected by this board's account, and a second connection would end its own: stop the agent first"
)


@contextmanager
def holding_off(config: AgentConfig) -> Iterator[bool]:
    """Keep the agent from connecting while the block lasts; tell whether a connection would take nothing from it.

    Args:
        config: Of the agent. Where its broker knows nobody by name, nobody is held off.
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
