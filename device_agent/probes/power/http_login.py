"""HTTP Digest (RFC 7616) and Basic (RFC 7617) authentication for power meters."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from shared.errors import NoData

MAX_BYTES = 1 << 12
PARAMETER = re.compile(r'(\w+)=(?:"([^"]*)"|([^\s,]+))', re.ASCII)
HASHES = {"SHA-256": hashlib.sha256, "MD5": hashlib.md5}
"""Shelly Gen2 and newer use SHA-256; MD5 is the default of the RFC."""


class Login(NamedTuple):
    """Credentials of a meter."""

    user: str
    password: str


def read_login(user: str, password_file: str) -> Login | None:
    """Read the password's file; None if none is configured. Raises NoData if it is unreadable."""
    if not password_file:
        return None
    try:
        with Path(password_file).open("rb") as file:
            lines = file.read(MAX_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise NoData(f"{password_file}: {cause}; put the meter's password there", lack="denied") from error
    return Login(user, lines[0] if lines else "")


def answer_challenge(challenge: str, login: Login, target: str) -> str:
    """Compute the `Authorization` header for a GET request.

    Args:
        challenge: The `WWW-Authenticate` header of the response.
        target: Path and query of the request.

    Raises:
        NoData: The meter asks for another scheme.
    """
    scheme, _, arguments = challenge.strip().partition(" ")
    if scheme.lower() == "basic":
        return "Basic " + base64.b64encode(f"{login.user}:{login.password}".encode()).decode()
    parameters = {key.lower(): quoted or plain for key, quoted, plain in PARAMETER.findall(arguments)}
    algorithm = parameters.get("algorithm", "MD5").upper()
    if scheme.lower() != "digest" or algorithm not in HASHES or "auth" not in parameters.get("qop", "auth").split(","):
        raise NoData(f"the meter asks for an unknown authentication scheme: {challenge[:80]!r}", lack="denied")

    def digest(text: str) -> str:
        return HASHES[algorithm](text.encode()).hexdigest()

    realm, nonce = parameters.get("realm", ""), parameters.get("nonce", "")
    count, own_nonce = "00000001", os.urandom(8).hex()
    secret, request = digest(f"{login.user}:{realm}:{login.password}"), digest(f"GET:{target}")
    fields = {"username": login.user, "realm": realm, "nonce": nonce, "uri": target}
    if "qop" in parameters:
        fields["response"] = digest(f"{secret}:{nonce}:{count}:{own_nonce}:auth:{request}")
        plain = f", qop=auth, nc={count}"
        fields["cnonce"] = own_nonce
    else:
        fields["response"], plain = digest(f"{secret}:{nonce}:{request}"), ""
    if "opaque" in parameters:
        fields["opaque"] = parameters["opaque"]
    return (
        "Digest " + ", ".join(f'{key}="{value}"' for key, value in fields.items()) + f"{plain}, algorithm={algorithm}"
    )
