"""Redact identifying data in texts that must stay parseable."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

MAC = re.compile(r"(?:[0-9A-Fa-f]{2}[:-]){5,}[0-9A-Fa-f]{2}")
NAMED_AFTER_MAC = re.compile(r"\b(enx|wlx|wwx)[0-9A-Fa-f]{12}")
UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
LONG_HEX = re.compile(r"[0-9A-Fa-f]{16,}")
IPV4 = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b")
IPV6 = re.compile(r"[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]{0,40}:[0-9A-Fa-f:.]{0,20}")
LABELLED = re.compile(
    r"^(.{0,200}?(?:serial|ssid|hostname|uuid)[^:=\n]{0,40}[:=][ \t]*|[ \t]*ssid[ \t]+)\S.*$",
    re.IGNORECASE | re.MULTILINE,
)


def redact(text: str, private: Iterable[str] = ()) -> str:
    """Redact serial numbers, MAC and IP addresses, network names, UUIDs and machine ids.

    Each is replaced by zeros of its format, or by a dash after its label, so that parsers of the text still work.

    Args:
        private: Further names to redact, such as the host's; only as whole words, for `raspberrypi` is also half of
            `raspberrypi,4-model-b`.
    """
    text = LABELLED.sub(r"\1-", text)
    text = UUID.sub("00000000-0000-0000-0000-000000000000", text)
    text = MAC.sub("00:00:00:00:00:00", text)
    text = NAMED_AFTER_MAC.sub(r"\g<1>000000000000", text)
    text = LONG_HEX.sub(_mask_digest, text)
    text = IPV4.sub(_mask_ipv4, text)
    text = IPV6.sub(_mask_ipv6, text)
    for name in private:
        if name:
            text = re.sub(rf"(?<![\w,.-]){re.escape(name)}(?![\w,.-])", "host", text)
    return text


def _mask_digest(match: re.Match[str]) -> str:
    digits = match[0]
    return digits if digits.isdecimal() else "0" * len(digits)  # a long counter is not a digest


def _mask_ipv4(match: re.Match[str]) -> str:
    try:
        ipaddress.IPv4Address(match[0])
    except ValueError:
        return match[0]
    return "0.0.0.0"  # noqa: S104 - a placeholder, not a bind address


def _mask_ipv6(match: re.Match[str]) -> str:
    try:
        address = ipaddress.IPv6Address(match[0].rstrip("."))
    except ValueError:
        return match[0]
    return match[0] if address.is_unspecified else "::"  # `0::` begins every line of /proc/self/cgroup
