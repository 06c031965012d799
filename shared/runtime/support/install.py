"""Unpack wheels beside a package's own Python, all of a purpose at once: whatever is cut off, the earlier ones stay.

    extras/current -> train-1a2b3c…      what the package's Python looks into, by a line of its `_setup.pth`
    extras/wheels/                       what has come so far; gone when all is in place

A wheel is a zip file whose folders are as they shall be (PEP 427); scripts and headers in it are of no use here.
"""

from __future__ import annotations

import compileall
import hashlib
import os
import shutil
import stat
import subprocess  # noqa: TID251 - another Python compiles for itself
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from shared.errors import ConfigError
from shared.runtime.extras import install_command, is_packaged, pth_path
from shared.runtime.interpreter import NOTE, OWN
from shared.runtime.support.fetch import Say, bring
from shared.runtime.support.table import MIB, Choice, Purpose

CURRENT, WHEELS, NEW = "current", "wheels", ".new"
SPARE_BYTES = 64 * MIB
LIBRARIES = ("purelib", "platlib")


def find_extras() -> Path:
    """Return the folder that a package's Python looks into.

    Raises:
        ConfigError: This is no package's Python: in a clone, pip installs what is wanted.
    """
    if not is_packaged():
        remedy = f"in a clone: make setup, or {', '.join(map(install_command, ('device', 'infer', 'server')))}"
        raise ConfigError(f"{sys.prefix} is not of a fieldfleet package; {remedy}")
    return Path(pth_path().read_text().strip()).parent


def name_of(choice: Choice, purpose: Purpose) -> str:
    """Return the name of the folder that holds just these wheels."""
    digest = hashlib.sha256("".join(sorted(one.sha256 for one in choice.wheels)).encode())
    return f"{purpose}-{digest.hexdigest()[:12]}"


def is_current(extras: Path, name: str) -> bool:
    """Return whether the folder of that name is in use."""
    link = extras / CURRENT
    return link.is_symlink() and link.readlink().name == name and link.is_dir()


def require_disk(extras: Path, choice: Choice, *, downloads: bool) -> None:
    """Refuse what would not fit on the disk, before anything comes.

    Args:
        downloads: Whether their files come here as well.

    Raises:
        ConfigError: It would not.
    """
    place = next(one for one in (extras, *extras.parents) if one.exists())
    free, needs = shutil.disk_usage(place).free, choice.unpacked + SPARE_BYTES + choice.bytes * downloads
    if free < needs:
        remedy = "make room there, or bring the files on another disk and name it by --from"
        raise ConfigError(f"{extras}: it takes {needs // MIB} MiB and {free // MIB} MiB are free; {remedy}")


def install(choice: Choice, purpose: Purpose, extras: Path, sources: Sequence[str], say: Say, *, ca: str = "") -> None:
    """Bring wheels and put them in place of what was there.

    Args:
        sources: As `bring`.
        say: Is told what is done.
        ca: As `bring`.

    Raises:
        ConfigError: As `bring`, or this user may not write there.
        Unreachable: As `bring`.
    """
    name = name_of(choice, purpose)
    try:
        bring(choice.wheels, extras / WHEELS, sources, say, ca)
        new = extras / NEW
        shutil.rmtree(new, ignore_errors=True)
        say(f"unpacking {choice.unpacked / 1e6:.0f} MB")
        for wheel in choice.wheels:
            unpack(extras / WHEELS / wheel.file, new)
        (new / NOTE).write_text(f"{choice.interpreter}\n")
        _compile(new, choice.interpreter)
        put_in_use(extras, new, name)
    except PermissionError as error:
        raise ConfigError(f"{error.filename or extras}: {error.strerror}; run it as root: sudo") from error
    except OSError as error:
        raise ConfigError(f"{error.filename or extras}: {error.strerror}; make room, then again") from error


def _compile(folder: Path, interpreter: str) -> None:
    """Compile libraries for the interpreter that will load them: the service may write nothing there."""
    if Path(interpreter).name == OWN or not shutil.which(interpreter):
        compileall.compile_dir(folder, quiet=2)
        return
    subprocess.run(  # noqa: S603 - a Python of the system
        [interpreter, "-I", "-m", "compileall", "-qq", folder], check=False, stdin=subprocess.DEVNULL
    )


def unpack(wheel: Path, into: Path) -> None:
    """Unpack a wheel's libraries into a folder.

    Raises:
        ConfigError: It holds a path that leads out of the folder.
    """
    with zipfile.ZipFile(wheel) as packed:
        for one in packed.infolist():
            place = _place_of(one.filename)
            if place is None or one.is_dir():
                continue
            if place.is_absolute() or ".." in place.parts or stat.S_ISLNK(one.external_attr >> 16):
                raise ConfigError(f"{wheel.name}: it holds {one.filename!r}, which no wheel should")
            target = into / place
            target.parent.mkdir(parents=True, exist_ok=True)
            with packed.open(one) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, MIB)
            target.chmod(0o644)


def _place_of(filename: str) -> PurePosixPath | None:
    """Return where a member of a wheel belongs among the libraries; None for what is none."""
    path = PurePosixPath(filename)
    if path.parts and path.parts[0].endswith(".data"):
        return PurePosixPath(*path.parts[2:]) if len(path.parts) > 2 and path.parts[1] in LIBRARIES else None  # noqa: PLR2004
    return path


def put_in_use(extras: Path, new: Path, name: str) -> None:
    """Have a folder of libraries used in place of the one before, in one step; what nobody uses then is removed.

    Args:
        new: The folder, on the same disk.
        name: What it is called from now on.
    """
    for folder, _, _ in os.walk(new):
        Path(folder).chmod(0o755)
    extras.chmod(0o755)
    shutil.rmtree(extras / name, ignore_errors=True)
    new.rename(extras / name)
    os.sync()
    link = extras / f"{CURRENT}{NEW}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(extras / CURRENT)
    for one in extras.iterdir():
        if one.name not in (CURRENT, name):
            shutil.rmtree(one, ignore_errors=True)
