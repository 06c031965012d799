"""`device-agent join`: join a site with a one-time token."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from device_agent.config import load_file
from device_agent.exchange.state_files import ensure_writable
from device_agent.identity.clock_floor import BoardClock
from device_agent.identity.credentials import Membership
from device_agent.identity.join import Join
from device_agent.upgrade.agent_folder import as_owner
from shared.errors import ConfigError, EnrolmentFailed
from shared.protocol.enrolment import MOST_TOKEN, Token, parse_token
from shared.protocol.topics import topic
from shared.runtime import backports
from shared.runtime.durable import replace_file
from shared.runtime.processes import keep_private
from shared.runtime.support import units
from shared.transport.base import Broker
from shared.transport.reach import find_refusal

DEFAULT_CONFIG = Path("/etc/fieldfleet/agent.toml")
DEFAULT_STATE, LOCAL_STATE = "/var/lib/fieldfleet", "state"
"""The agent's folder: the package's, or beside a file in another place."""
DEFAULT_EXAMPLES = Path("/srv/examples")
SERVICE = "fieldfleet-agent"
PUBLIC = 0o644
STANDARD_INPUT = "-"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Join a site with a one-time token, and write agent.toml if it is missing. If root runs this, it joins "
        "as the agent's user and starts the package's service. The command can be repeated."
    )
    parser.epilog = (
        "Exit codes: 0 joined; 2 configuration error, or the token is used, expired or unknown; 3 the gateway is not "
        "the one that the token names; 4 a clock is wrong; 5 no answer."
    )
    help_ = "token printed by `edge-server enrol`; prefer `-` (standard input), since other users may see command lines"
    parser.add_argument("token", metavar="TOKEN", nargs="?", default=STANDARD_INPUT, help=help_)
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="read the token from this file")
    help_ = "the agent's TOML file; default: %(default)s"
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, metavar="FILE", help=help_)
    help_ = "folder or .npz file of this board's examples, written into a new agent.toml; default: %(default)s"
    parser.add_argument("--data", type=Path, default=DEFAULT_EXAMPLES, metavar="PATH", help=help_)


def run(options: argparse.Namespace) -> int:
    """Join; print each step, and the reason of a failure."""
    keep_private()
    token = read_token(options.token, options.token_file)
    is_new = not options.config.exists()
    state_dir, device = _plan_new_file(options.config) if is_new else _read_file(options.config)
    try:
        with as_owner(state_dir) if state_dir.is_dir() else nullcontext():
            folder = ensure_writable(state_dir, "name a folder this user may write")
            membership = backports.run(_join(token, device, folder))
    except EnrolmentFailed as error:
        sys.stderr.write(f"device-agent: {error}\n")
        return error.code
    if is_new:
        write_initial_config(options.config, state_dir, options.data)
        _print(f"{options.config}: written; examples are read from {options.data}")
    _print(f"joined as {membership.device}: {options.config} need not name device, site and broker")
    if options.config == DEFAULT_CONFIG and units.can_start_services():
        _print(_restart_service())
    return 0


def _plan_new_file(path: Path) -> tuple[Path, str]:
    """Return the agent's folder and no name, for an agent file still to be written.

    Raises:
        ConfigError: This user may not write it.
    """
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # `access` answers for the host of an emulated board
            pass
    except OSError as error:
        problem = f"{path} does not exist and cannot be written ({error.strerror})"
        raise ConfigError(f"{problem}; run this as root or name another file") from error
    return (Path(DEFAULT_STATE) if path == DEFAULT_CONFIG else path.absolute().parent / LOCAL_STATE), ""


def _read_file(path: Path) -> tuple[Path, str]:
    """Return the agent's folder and the board's name, if any, from its file."""
    config = load_file(path)
    return Path(config.state_dir), config.device


def write_initial_config(path: Path, state_dir: Path, examples: Path) -> None:
    """Write the initial agent file of a board that has joined, for people to edit.

    Args:
        examples: Folder or `.npz` file of the board; need not exist yet.
    """
    source = "npz" if examples.suffix == ".npz" else "folder"
    text = (
        "# This board's agent, made by `device-agent join`, which knows device, site and broker. All that may stand\n"
        "# here is in device_agent/README.md; examples are in /usr/share/doc/fieldfleet-agent/examples.\n"
        f"state_dir = {json.dumps(str(state_dir))}\n"
        "\n"
        "[data]  # this board's own examples, which never leave it\n"
        f'source = "{source}"  # digits, idx, npz, folder, csv\n'
        f"path = {json.dumps(str(examples.absolute()))}\n"
    )
    replace_file(path, text.encode(), mode=PUBLIC)


def _restart_service() -> str:
    """Restart the package's service; return the outcome."""
    refusal = units.restart(SERVICE)
    return f"{SERVICE} does not run: {refusal}" if refusal else f"{SERVICE} runs"


def read_token(argument: str, file: Path | None) -> Token:
    """Return the token from a command line, a file or standard input.

    Args:
        argument: From the command line; `-` for standard input.
        file: File with the token; None if not given.

    Raises:
        ConfigError: It is malformed or cannot be read.
    """
    if file is not None:
        try:
            with file.open(encoding="utf-8-sig") as stream:
                return parse_token(stream.read(2 * MOST_TOKEN))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read ({error}); write the token's line there") from error
    if argument != STANDARD_INPUT:
        return parse_token(argument)
    if sys.stdin.isatty():
        sys.stderr.write("token: ")
        sys.stderr.flush()
    return parse_token(sys.stdin.readline(2 * MOST_TOKEN).removeprefix("\ufeff"))


async def _join(token: Token, device: str, folder: Path) -> Membership:
    clock = BoardClock.of(folder)

    async def prove(broker: Broker, membership: Membership) -> str:
        client_id = f"{membership.site}.{membership.device}.join"
        place = topic(membership.site, membership.device, "probe")
        return await find_refusal(broker, client_id, place, dates=clock.may_judge())

    return await Join(token, folder, device, clock, prove, _print).run()


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
