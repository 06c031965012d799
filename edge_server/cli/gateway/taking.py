"""Take in what a gateway offers to its boards, and say what that is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import ConfigError
from shared.runtime.text_table import write_text

if TYPE_CHECKING:
    from edge_server.gateway.packages.deb import DebFacts
    from edge_server.gateway.site_folder import SiteFolder
    from shared.protocol.packages import PackageManifest


def find_packages(folder: Path) -> list[Path]:
    """Return the packages of the agent in a folder.

    Raises:
        ConfigError: There are none.
    """
    found = sorted(folder.glob("fieldfleet-agent_*.deb")) if folder.is_dir() else []
    if not found:
        raise ConfigError(f"{folder}: holds no fieldfleet-agent_*.deb; `make deb` builds them")
    return found


@contextmanager
def reading_packages(folder: Path | None) -> Iterator[Callable[[], list[tuple[Path, DebFacts]]]]:
    """Read packages of a folder while the block lasts; yields what returns their paths, and what they say.

    Args:
        folder: With packages; None where none are asked for.

    Raises:
        ConfigError: There are none.
    """
    if folder is None:
        yield list
        return
    from edge_server.gateway.packages.store import read_debs  # noqa: PLC0415

    paths = find_packages(folder)
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(read_debs, paths).result


def take_folder(site: SiteFolder, folder: Path, found: Sequence[tuple[Path, DebFacts]]) -> None:
    """Take in what a folder has for boards: packages of the agent, and wheels where there are some.

    Args:
        site: The folder of the site.

    Raises:
        ConfigError: One cannot be taken.
    """
    take_packages(site, found)
    if any(folder.glob("*.whl")):
        take_wheels(site, folder)


def take_packages(site: SiteFolder, found: Sequence[tuple[Path, DebFacts]]) -> None:
    """Take packages in that were read, and say which."""
    from edge_server.gateway.packages.store import add_parsed_packages  # noqa: PLC0415

    for one in add_parsed_packages(site, found):
        write_text(sys.stdout, f"{one.name} {one.version} for {kinds(one)}, signed for site {one.site}")


def take_wheels(site: SiteFolder, folder: Path) -> None:
    """Take wheels in, and say how many."""
    from edge_server.gateway.packages.store import add_wheels  # noqa: PLC0415

    new = add_wheels(site, folder)
    size = sum(one.size for one in new)
    write_text(sys.stdout, f"{len(new)} wheels more, {size / 1e6:.0f} MB")


def kinds(manifest: PackageManifest) -> str:
    """Return for which boards a version is."""
    return ", ".join(one.kind for one in manifest.builds)
