"""Install a set of wheels beside a package's Python, atomically.

    extras/current -> train-1a2b3c…      on the Python's path, by a line of its `_setup.pth`
    extras/wheels/                       downloads so far; removed when all are installed

A wheel is a zip file with the final folder layout (PEP 427); its scripts and headers are not needed here.
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
from shared.runtime.extras import install_command, is_packaged, setup_pth_path
from shared.runtime.interpreter import NOTE, OWN
from shared.runtime.support.fetch import Say, download_wheels
from shared.runtime.support.table import MIB, Choice, Purpose

CURRENT, WHEELS, NEW = "current", "wheels", ".new"
SPARE_BYTES = 64 * MIB
LIBRARIES = ("purelib", "platlib")


def find_extras() -> Path:
    """Return the folder on a package's Python path.

    Raises:
        ConfigError: This is not a package's Python: in a clone, use pip.
    """
    if not is_packaged():
        remedy = f"in a clone: make setup, or {', '.join(map(install_command, ('device', 'infer', 'server')))}"
        raise ConfigError(f"{sys.prefix} does not belong to a fieldfleet package; {remedy}")
    return Path(setup_pth_path().read_text().strip()).parent


def folder_name(choice: Choice, purpose: Purpose) -> str:
    """Return the folder name for exactly these wheels."""
    digest = hashlib.sha256("".join(sorted(wheel.sha256 for wheel in choice.wheels)).encode())
    return f"{purpose}-{digest.hexdigest()[:12]}"


def is_current(extras: Path, name: str) -> bool:
    """Check whether the folder of that name is in use."""
    link = extras / CURRENT
    return link.is_symlink() and link.readlink().name == name and link.is_dir()


def require_disk(extras: Path, choice: Choice, *, downloads: bool) -> None:
    """Refuse to install what does not fit on the disk.

    Args:
        downloads: Whether the wheels are downloaded as well.

    Raises:
        ConfigError: The disk has too little space.
    """
    place = next(folder for folder in (extras, *extras.parents) if folder.exists())
    free, needs = shutil.disk_usage(place).free, choice.unpacked_bytes + SPARE_BYTES + choice.bytes * downloads
    if free < needs:
        remedy = "free some space, or put the files on another disk and name it by --from"
        raise ConfigError(f"{extras}: needs {needs // MIB} MiB and {free // MIB} MiB are free; {remedy}")


def install(choice: Choice, purpose: Purpose, extras: Path, sources: Sequence[str], say: Say, *, ca: str = "") -> None:
    """Download wheels and replace the installed ones.

    The arguments are those of `download_wheels`.

    Raises:
        ConfigError: A wheel is missing or wrong, or this user may not write there.
        Unreachable: An index does not answer.
    """
    name = folder_name(choice, purpose)
    try:
        download_wheels(choice.wheels, extras / WHEELS, sources, say, ca)
        new = extras / NEW
        shutil.rmtree(new, ignore_errors=True)
        say(f"unpacking {choice.unpacked_bytes / 1e6:.0f} MB")
        for wheel in choice.wheels:
            unpack(extras / WHEELS / wheel.file, new)
        (new / NOTE).write_text(f"{choice.interpreter}\n")
        _compile(new, choice.interpreter)
        activate(extras, new, name)
    except PermissionError as error:
        raise ConfigError(f"{error.filename or extras}: {error.strerror}; run it as root: sudo") from error
    except OSError as error:
        raise ConfigError(f"{error.filename or extras}: {error.strerror}; free some space and repeat") from error


def _compile(folder: Path, interpreter: str) -> None:
    """Compile libraries for the interpreter that will load them: the service has no right to write there."""
    if Path(interpreter).name == OWN or not shutil.which(interpreter):
        compileall.compile_dir(folder, quiet=2)
        return
    subprocess.run(  # noqa: S603 - the system's Python
        [interpreter, "-I", "-m", "compileall", "-qq", folder], check=False, stdin=subprocess.DEVNULL
    )


def unpack(wheel: Path, into: Path) -> None:
    """Unpack a wheel's libraries into a folder.

    Raises:
        ConfigError: A path leads out of the folder.
    """
    with zipfile.ZipFile(wheel) as packed:
        for member in packed.infolist():
            place = _library_path(member.filename)
            if place is None or member.is_dir():
                continue
            if place.is_absolute() or ".." in place.parts or stat.S_ISLNK(member.external_attr >> 16):
                raise ConfigError(f"{wheel.name}: it holds {member.filename!r}, which is not allowed in a wheel")
            target = into / place
            target.parent.mkdir(parents=True, exist_ok=True)
            with packed.open(member) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, MIB)
            target.chmod(0o644)


def _library_path(filename: str) -> PurePosixPath | None:
    """Return a wheel member's path among the libraries; None for scripts, headers and data."""
    path = PurePosixPath(filename)
    if path.parts and path.parts[0].endswith(".data"):
        return PurePosixPath(*path.parts[2:]) if len(path.parts) > 2 and path.parts[1] in LIBRARIES else None  # noqa: PLR2004
    return path


def activate(extras: Path, new: Path, name: str) -> None:
    """Switch atomically to a new folder of libraries, and remove the old ones.

    Args:
        new: Folder on the same disk.
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
    for entry in extras.iterdir():
        if entry.name not in (CURRENT, name):
            shutil.rmtree(entry, ignore_errors=True)
