"""Raspberry Pi firmware queries: clocks and throttling beyond what Linux reports."""

from __future__ import annotations

import fcntl
import os
import re
import struct
from pathlib import Path

from device_agent.hardware.files import LACK_BY_ERRNO, path_exists
from device_agent.hardware.tools import LIVE_ROOT, run_tool
from shared.errors import NoData
from shared.protocol.measurements import Lack

MAILBOX_DEVICES = ("dev/vcio_gencmd", "dev/vcio")
"""The first only answers queries and belongs to group `video`; older systems have only the second."""

COMMAND_TAG = 0x00030080
ANSWER_BYTES = 4096
RESPONSE_OK = 0x80000000
HEAD = struct.Struct("=6I")
MESSAGE = struct.Struct(f"=6I{ANSWER_BYTES}sI")
MAILBOX_IOCTL = 0xC0000000 | struct.calcsize("P") << 16 | 100 << 8
"""_IOWR(100, 0, char *): 0xC0086400 where a pointer has 8 bytes, 0xC0046400 where it has 4."""

KNOWN_BITS = 0xF000F
REMEDY = "add the agent's user to the group `video`, and pass the device into a container"


def ask(root: Path, question: str) -> str:
    """Return the firmware's answer to a vcgencmd query, such as `measure_clock arm`.

    On the board itself it uses the kernel's mailbox, which needs no process; without a mailbox, and below another root,
    the tool or its recorded output.

    Raises:
        NoData: This is not a Raspberry Pi, the mailbox is not accessible, or the firmware does not know the query.
    """
    devices = [root / name for name in MAILBOX_DEVICES if root == LIVE_ROOT and path_exists(root / name)]
    if devices:
        return ask_mailbox(next((device for device in devices if os.access(device, os.R_OK)), devices[0]), question)
    return parse_answer(run_tool(root, ["vcgencmd", *question.split()]), question)


def ask_mailbox(device: Path, question: str) -> str:
    """Query the firmware through a mailbox device; raises NoData."""
    message = pack_message(question)
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(descriptor, MAILBOX_IOCTL, message)
        finally:
            os.close(descriptor)
    except OSError as error:
        lack: Lack = LACK_BY_ERRNO.get(error.errno or 0, "invalid")
        remedy = f": {REMEDY}" if lack == "denied" else ""
        raise NoData(f"{device}: {error.strerror}{remedy}", lack=lack) from error
    return parse_answer(unpack_message(bytes(message), question), question)


def pack_message(question: str) -> bytearray:
    """Pack a query as a mailbox message: length, code, tag, answer size, its length, error, text, end."""
    return bytearray(MESSAGE.pack(MESSAGE.size, 0, COMMAND_TAG, ANSWER_BYTES, 0, 0, question.encode(), 0))


def unpack_message(message: bytes, question: str = "") -> str:
    """Unpack the text of an answered message; raises NoData if the firmware refused it."""
    _, code, _, _, _, error = HEAD.unpack_from(message)
    answer = message[HEAD.size : HEAD.size + ANSWER_BYTES].partition(b"\0")[0].decode(errors="replace")
    if code != RESPONSE_OK or error:
        raise NoData(f"the firmware refuses {question!r}: code {code:#x}, error {error} {answer[:80]}", lack="invalid")
    return answer


def parse_answer(answer: str, question: str) -> str:
    """Return an answer without surrounding blanks; raises NoData for error messages, which arrive the same way."""
    answer = answer.strip("\0 \t\r\n")
    if not answer:
        raise NoData(f"the firmware's answer to {question!r} is empty", lack="invalid")
    if re.search(r"open device|permission denied|VCHI init", answer, re.IGNORECASE):
        raise NoData(f"{answer[:120]}: {REMEDY}", lack="denied")
    if "error_msg=" in answer or answer.startswith("error="):
        raise NoData(f"the firmware does not know {question!r}: {answer[:120]}", lack="not_present")
    return answer


def parse_clock_hertz(answer: str) -> float:
    """Parse the clock in `frequency(48)=700154304`; raises NoData, also for a stopped clock."""
    hertz = _match(r"frequency\(\d+\)=(\d{1,12})", answer)
    if not int(hertz):
        raise NoData(f"{answer!r} reports a stopped clock", lack="invalid")
    return float(hertz)


def parse_throttled_bits(answer: str) -> int:
    """Parse the bits in `throttled=0x50005` (0 to 3: now, 16 to 19: since boot); raises NoData, also for other bits."""
    bits = int(_match(r"throttled=(0x[0-9a-fA-F]{1,8})", answer), 16)
    if bits & ~KNOWN_BITS:
        raise NoData(f"{answer!r} has undocumented bits", lack="invalid")
    return bits


def parse_celsius(answer: str) -> float:
    """Parse the temperature in `temp=43.8'C`; raises NoData."""
    return float(_match(r"temp=(-?\d{1,4}(?:\.\d{1,4})?)'C", answer))


def _match(pattern: str, answer: str) -> str:
    match = re.fullmatch(pattern, answer.strip(), re.ASCII)
    if match is None:
        raise NoData(f"{answer[:80]!r} does not match {pattern}", lack="invalid")
    return match[1]
