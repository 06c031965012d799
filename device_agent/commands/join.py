"""`device-agent join`: become a device of a site by a one-time token, with a key that never leaves this board."""

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

USUAL = Path("/etc/fieldfleet/agent.toml")
USUAL_STATE, OTHER_STATE = "/var/lib/fieldfleet", "state"
"""The agent's folder: the package's own, or beside a file that lies elsewhere."""
USUAL_EXAMPLES = Path("/srv/examples")
SERVICE = "fieldfleet-agent"
PUBLIC = 0o644
INSTEAD = "-"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Become a device of a site by a one-time token. Exit codes: 0 joined; 2 the token is used, expired or unknown, "
        "or the file needs an edit; 3 the gateway is not the one that the token names; 4 a clock is wrong; 5 nobody "
        "answers. After any of them the same again is no harm. A file that is not there yet is written. Root joins "
        "in the name of the agent's user, and has systemd start the package's service."
    )
    help_ = (
        "as `edge-server enrol` printed it; better `-`, to read it from standard input: others may see command lines"
    )
    parser.add_argument("token", metavar="TOKEN", nargs="?", default=INSTEAD, help=help_)
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="read the token from there")
    parser.add_argument(
        "--config", type=Path, default=USUAL, metavar="FILE", help="the agent's TOML file; default: %(default)s"
    )
    help_ = "folder or .npz file of this board's examples, for a file that is not there yet; default: %(default)s"
    parser.add_argument("--data", type=Path, default=USUAL_EXAMPLES, metavar="PATH", help=help_)


def run(options: argparse.Namespace) -> int:
    """Join; print each step, and why where it fails."""
    keep_private()
    token = read_token(options.token, options.token_file)
    is_new = not options.config.exists()
    state_dir, device = _first(options.config) if is_new else _told(options.config)
    try:
        with as_owner(state_dir) if state_dir.is_dir() else nullcontext():
            folder = ensure_writable(state_dir, "name a folder this user may write")
            membership = backports.run(_join(token, device, folder))
    except EnrolmentFailed as error:
        sys.stderr.write(f"device-agent: {error}\n")
        return error.code
    if is_new:
        write_first_file(options.config, state_dir, options.data)
        _say(f"{options.config}: written; the examples are looked for in {options.data}")
    _say(f"joined: {options.config} need not name device, site and broker; `device-agent run` is {membership.device} now")
    if options.config == USUAL and units.can_start_services():
        _say(_started())
    return 0


def _first(path: Path) -> tuple[Path, str]:
    """Return the agent's folder, and no name, where its file is still to be written.

    Raises:
        ConfigError: This user may not write it.
    """
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # what `access` says of an emulated board is of another system
            pass
    except OSError as error:
        why = f"{path}: is not there, and cannot be written ({error.strerror})"
        raise ConfigError(f"{why}; run this as root, or name another") from error
    return (Path(USUAL_STATE) if path == USUAL else path.absolute().parent / OTHER_STATE), ""


def _told(path: Path) -> tuple[Path, str]:
    """Return the agent's folder and the board's name, where it has one, by its file."""
    config = load_file(path)
    return Path(config.state_dir), config.device


def write_first_file(path: Path, state_dir: Path, examples: Path) -> None:
    """Write an agent's file with what a board needs that has joined; people edit it from then on.

    Args:
        examples: Of the board, a folder or an `.npz` file; need not be there yet.
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


def _started() -> str:
    """Have the package's service take up what the board is now; return what became of it."""
    refusal = units.restart(SERVICE)
    return f"{SERVICE} does not run: {refusal}" if refusal else f"{SERVICE} runs"


def read_token(argument: str, file: Path | None) -> Token:
    """Return the token of a command line, a file, or standard input.

    Args:
        argument: Of the command line; `-` for standard input.
        file: Where it is instead; None where it is not.

    Raises:
        ConfigError: It is none, or cannot be read.
    """
    if file is not None:
        try:
            with file.open(encoding="utf-8-sig") as stream:
                return parse_token(stream.read(2 * MOST_TOKEN))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read ({error}); write the token's line there") from error
    if argument != INSTEAD:
        return parse_token(argument)
    if sys.stdin.isatty():
        sys.stderr.write("token: ")
        sys.stderr.flush()
    return parse_token(sys.stdin.readline(2 * MOST_TOKEN).removeprefix("\ufeff"))


async def _join(token: Token, device: str, folder: Path) -> Membership:
    clock = BoardClock.of(folder)

    async def prove(broker: Broker, membership: Membership) -> str:
        name, own = f"{membership.site}.{membership.device}", (membership.site, membership.device)
        return await find_refusal(broker, f"{name}.join", topic(*own, "probe"), dates=clock.may_judge())

    return await Join(token, folder, device, clock, prove, _say).run()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
