"""HTTP authentication of a meter: Digest (RFC 7616) and Basic (RFC 7617), and the password's file."""

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
"""Shelly of Gen2 and newer wants the first; without a word MD5 is meant."""


class Login(NamedTuple):
    """Name and password."""

    user: str
    password: str


def read_login(user: str, password_file: str) -> Login | None:
    """Read a password; None where no file is named. Raises NoData where it cannot be read."""
    if not password_file:
        return None
    try:
        with Path(password_file).open("rb") as file:
            lines = file.read(MAX_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise NoData(f"{password_file}: {cause}: put the meter's password there", lack="denied") from error
    return Login(user, lines[0] if lines else "")


def answer_challenge(challenge: str, login: Login, target: str) -> str:
    """Return the `Authorization` that a `WWW-Authenticate` asks for.

    Args:
        challenge: As the meter sent it.
        target: Path and query of the request, a GET.

    Raises:
        NoData: The meter wants another scheme.
    """
    scheme, _, rest = challenge.strip().partition(" ")
    if scheme.lower() == "basic":
        return "Basic " + base64.b64encode(f"{login.user}:{login.password}".encode()).decode()
    asked = {key.lower(): quoted or plain for key, quoted, plain in PARAMETER.findall(rest)}
    algorithm = asked.get("algorithm", "MD5").upper()
    if scheme.lower() != "digest" or algorithm not in HASHES or "auth" not in asked.get("qop", "auth").split(","):
        raise NoData(f"the meter wants a login of a kind that is not known: {challenge[:80]!r}", lack="denied")

    def digest(text: str) -> str:
        return HASHES[algorithm](text.encode()).hexdigest()

    realm, nonce = asked.get("realm", ""), asked.get("nonce", "")
    count, own_nonce = "00000001", os.urandom(8).hex()
    secret, request = digest(f"{login.user}:{realm}:{login.password}"), digest(f"GET:{target}")
    fields = {"username": login.user, "realm": realm, "nonce": nonce, "uri": target}
    if "qop" in asked:
        fields["response"] = digest(f"{secret}:{nonce}:{count}:{own_nonce}:auth:{request}")
        plain = f", qop=auth, nc={count}"
        fields["cnonce"] = own_nonce
    else:
        fields["response"], plain = digest(f"{secret}:{nonce}:{request}"), ""
    if "opaque" in asked:
        fields["opaque"] = asked["opaque"]
    return (
        "Digest " + ", ".join(f'{key}="{value}"' for key, value in fields.items()) + f"{plain}, algorithm={algorithm}"
    )
