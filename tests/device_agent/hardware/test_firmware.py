"""What a Raspberry Pi's firmware is asked and answers: the mailbox's messages byte by byte, and every refusal."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from device_agent.hardware import firmware
from device_agent.hardware.tools import LIVE_ROOT
from shared.errors import NoData
from tests.machine import as_nobody, grow, open_to_all, shared

WORD = 4


def answered(text: bytes, code: int = 0x80000000, error: int = 0) -> bytes:
    """Return what the firmware makes of a message: it writes the code, the error and its text over the question."""
    message = firmware.pack_message("measure_clock arm")
    struct.pack_into("=I", message, 1 * WORD, code)
    struct.pack_into("=I", message, 5 * WORD, error)
    struct.pack_into(f"{len(text) + 1}s", message, 6 * WORD, text)
    return bytes(message)


def test_a_question_is_packed_as_the_firmware_wants_it():
    """Six words, the text in a room of whole words, an end tag: the first word is the length of all of it."""
    message = firmware.pack_message("get_throttled")
    words = struct.unpack_from("=6I", message)
    assert words == (len(message), 0, 0x00030080, 4096, 0, 0)
    assert len(message) == 6 * WORD + 4096 + WORD
    assert bytes(message[24:38]) == b"get_throttled\0"
    assert bytes(message[-WORD:]) == bytes(WORD)


def test_the_request_carries_the_size_of_a_pointer():
    """_IOWR(100, 0, char *), as the kernel's header makes it on this machine."""
    assert {4: 0xC0046400, 8: 0xC0086400}[struct.calcsize("P")] == firmware.MAILBOX_IOCTL


def test_an_answer_ends_at_its_first_zero():
    """What is left of a longer question behind it is no part of it."""
    assert firmware.unpack_message(answered(b"throttled=0x0")) == "throttled=0x0"


@pytest.mark.parametrize(("code", "error"), [(0, 0), (0x80000001, 0), (0x80000000, 1)])
def test_a_message_that_was_refused_is_no_answer(code, error):
    with pytest.raises(NoData) as caught:
        firmware.unpack_message(answered(b"frequency(48)=1", code, error), "measure_clock arm")
    assert caught.value.lack == "invalid"
    assert "measure_clock arm" in str(caught.value)


@pytest.mark.parametrize(
    ("said", "lack"),
    [
        ('error=1 error_msg="Command not registered"', "not_present"),
        ('error=2 error_msg="Invalid arguments"', "not_present"),
        ("Can't open device file: /dev/vcio\nTry creating a device file with: sudo mknod /dev/vcio c 100 0", "denied"),
        ("VCHI initialization failed", "denied"),
        ("", "invalid"),
        ("\0\n", "invalid"),
    ],
)
def test_what_the_tool_prints_instead_of_an_answer(tmp_path, said, lack):
    """Older tools end with 0 whatever happened."""
    grow(tmp_path, {"tools/vcgencmd measure_clock arm": said})
    with pytest.raises(NoData) as caught:
        firmware.ask(tmp_path, "measure_clock arm")
    assert caught.value.lack == lack
    assert ("`video`" in str(caught.value)) == (lack == "denied")


def test_a_recorded_answer_is_read_without_the_mailbox(tmp_path):
    """Not even where the recording holds a file of the mailbox' name."""
    grow(tmp_path, {"dev/vcio": "", "tools/vcgencmd get_throttled": "throttled=0x50005"})
    assert firmware.ask(tmp_path, "get_throttled") == "throttled=0x50005"


def test_a_mailbox_that_is_not_ours_names_the_remedy():
    with open_to_all() as folder:
        device = folder / "vcio"
        device.touch(mode=0o600)
        with as_nobody(), pytest.raises(NoData, match="`video`") as caught:
            firmware.ask_mailbox(device, "get_throttled")
    assert caught.value.lack == "denied"


def test_a_file_that_is_no_mailbox_is_invalid(tmp_path):
    """The kernel refuses the request: ENOTTY."""
    (tmp_path / "vcio").touch()
    with pytest.raises(NoData) as caught:
        firmware.ask_mailbox(tmp_path / "vcio", "get_throttled")
    assert caught.value.lack == "invalid"


def test_a_machine_without_firmware_says_that_it_is_not_there():
    if any((LIVE_ROOT / name).exists() for name in firmware.MAILBOX_DEVICES):
        pytest.skip("this is a Raspberry Pi")
    with pytest.raises(NoData) as caught:
        firmware.ask(LIVE_ROOT, "get_throttled")
    assert caught.value.lack == "not_present"


@pytest.mark.board
def test_a_raspberry_pi_answers():
    """Through the mailbox, on the board itself."""
    if not any((LIVE_ROOT / name).exists() for name in firmware.MAILBOX_DEVICES):
        pytest.skip("this is no Raspberry Pi")
    assert firmware.parse_clock_hertz(firmware.ask(LIVE_ROOT, "measure_clock arm")) > 1e8


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("measure_clock_arm_overclock.txt", [2000478464.0]),
        ("measure_clock_vs_scaling_cur_freq.txt", [700154304.0]),
        ("thermal_capped_snapshot.txt", [1141118000.0]),
    ],
)
def test_recorded_clocks(name, expected):
    lines = shared("reference", "boards", "rpi-4b", name).read_text().splitlines()
    clocks = [firmware.parse_clock_hertz(line.split("\t")[-1]) for line in lines if "frequency(" in line]
    assert clocks == expected


def test_recorded_throttle_words_and_temperature():
    folder = shared("reference", "boards", "rpi-4b")
    words = [
        firmware.parse_throttled_bits(line) for line in (folder / "get_throttled_values.txt").read_text().splitlines()
    ]
    assert words == [0x0, 0x50000, 0x50005, 0x60002, 0x80000, 0xE0008]
    assert firmware.parse_celsius((folder / "measure_temp.txt").read_text()) == pytest.approx(43.8)


@pytest.mark.parametrize(
    "answer", ["frequency(48)=0", "frequency(48)=", "frequency(48)=700MHz", "frequency(48)=7\nfrequency(48)=8", "1400"]
)
def test_an_answer_of_another_form_is_no_clock(answer):
    with pytest.raises(NoData) as caught:
        firmware.parse_clock_hertz(answer)
    assert caught.value.lack == "invalid"


@pytest.mark.parametrize("answer", ["throttled=", "throttled=50005", "throttled=0x", "throttled=0x5000500050005"])
def test_an_answer_of_another_form_has_no_bits(answer):
    with pytest.raises(NoData):
        firmware.parse_throttled_bits(answer)


def test_temperatures_below_zero_are_temperatures():
    assert firmware.parse_celsius("temp=-3.2'C") == pytest.approx(-3.2)
    with pytest.raises(NoData):
        firmware.parse_celsius("temp=43.8")


def test_the_sample_is_a_path(tmp_path: Path):
    """A question's words are the name of its recording, joined by blanks."""
    grow(tmp_path, {"tools/vcgencmd measure_clock arm": "frequency(48)=1200126000"})
    assert firmware.parse_clock_hertz(firmware.ask(tmp_path, "measure_clock arm")) == pytest.approx(1200126000)
