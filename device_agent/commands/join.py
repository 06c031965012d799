"""`device-agent join`: become a device of a site by a one-time token, with a key that never leaves this board."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from device_agent.config import AgentConfig, load_file
from device_agent.exchange.state_files import writable
from device_agent.identity.clock_floor import BoardClock
from device_agent.identity.credentials import Membership
from device_agent.identity.join import Join
from shared.errors import ConfigError, EnrolmentFailed
from shared.protocol.enrolment import MOST_TOKEN, Token, parse_token
from shared.protocol.topics import topic
from shared.runtime.processes import keep_private
from shared.transport.base import Broker
from shared.transport.reach import find_refusal

USUAL = Path("/etc/fieldfleet/agent.toml")
INSTEAD = "-"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Become a device of a site by a one-time token. Exit codes: 0 joined; 2 the token is used, expired or unknown, "
        "or the file needs an edit; 3 the gateway is not the one that the token names; 4 a clock is wrong; 5 nobody "
        "answers. After any of them the same again is no harm."
    )
    help_ = (
        "as `edge-server enrol` printed it; better `-`, to read it from standard input: others may see command lines"
    )
    parser.add_argument("token", metavar="TOKEN", nargs="?", default=INSTEAD, help=help_)
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="read the token from there")
    parser.add_argument(
        "--config", type=Path, default=USUAL, metavar="FILE", help="the agent's TOML file; default: %(default)s"
    )


def run(options: argparse.Namespace) -> int:
    """Join; print each step, and why where it fails."""
    keep_private()
    config = load_file(options.config)
    token = read_token(options.token, options.token_file)
    folder = writable(Path(config.state_dir), "name a folder this user may write")
    try:
        found = asyncio.run(_join(token, config, folder))
    except EnrolmentFailed as error:
        sys.stderr.write(f"device-agent: {error}\n")
        return error.code
    _say(f"joined: {options.config} need not name device, site and broker; `device-agent run` is {found.device} now")
    return 0


def read_token(told: str, file: Path | None) -> Token:
    """Return the token of a command line, a file, or standard input.

    Args:
        told: Of the command line; `-` for standard input.
        file: Where it is instead; None where it is not.

    Raises:
        ConfigError: It is none, or cannot be read.
    """
    if file is not None:
        try:
            with file.open(encoding="utf-8") as stream:
                return parse_token(stream.read(2 * MOST_TOKEN))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read ({error}); write the token's line there") from error
    if told != INSTEAD:
        return parse_token(told)
    if sys.stdin.isatty():
        sys.stderr.write("token: ")
        sys.stderr.flush()
    return parse_token(sys.stdin.readline(2 * MOST_TOKEN))


async def _join(token: Token, config: AgentConfig, folder: Path) -> Membership:
    clock = BoardClock.of(folder)

    async def prove(broker: Broker, membership: Membership) -> str:
        name, own = f"{membership.site}.{membership.device}", (membership.site, membership.device)
        return await find_refusal(broker, f"{name}.join", topic(*own, "probe"), dates=clock.may_judge())

    return await Join(token, folder, config.device, clock, prove, _say).run()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
