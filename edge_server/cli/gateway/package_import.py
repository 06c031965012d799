"""Import agent packages and wheels into a gateway's store, and report them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edge_server.cli.terminal import write_text
from shared.errors import ConfigError

if TYPE_CHECKING:
    from edge_server.gateway.packages.deb import DebFacts
    from edge_server.gateway.site_folder import SiteFolder
    from shared.protocol.packages import PackageManifest


def find_packages(folder: Path) -> list[Path]:
    """Return the packages of the agent in a folder.

    Raises:
        ConfigError: There are none.
    """
    paths = sorted(folder.glob("fieldfleet-agent_*.deb")) if folder.is_dir() else []
    if not paths:
        raise ConfigError(f"{folder}: contains no fieldfleet-agent_*.deb; build them by `make deb`")
    return paths


@contextmanager
def read_in_background(folder: Path | None) -> Iterator[Callable[[], list[tuple[Path, DebFacts]]]]:
    """Read the packages of a folder during the block; yield a function that returns paths and metadata.

    Args:
        folder: Folder with packages; None for none.

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


def import_folder(site: SiteFolder, folder: Path, packages: Sequence[tuple[Path, DebFacts]]) -> None:
    """Import a folder: packages of the agent, and wheels if there are any.

    Raises:
        ConfigError: One cannot be imported.
    """
    import_packages(site, packages)
    if any(folder.glob("*.whl")):
        import_wheels(site, folder)


def import_packages(site: SiteFolder, packages: Sequence[tuple[Path, DebFacts]]) -> None:
    """Add packages that have been read, and print them."""
    from edge_server.gateway.packages.store import add_parsed_packages  # noqa: PLC0415

    for manifest in add_parsed_packages(site, packages):
        write_text(
            sys.stdout,
            f"{manifest.name} {manifest.version} for {format_builds(manifest)}, signed for site {manifest.site}",
        )


def import_wheels(site: SiteFolder, folder: Path) -> None:
    """Add wheels, and print how many."""
    from edge_server.gateway.packages.store import add_wheels  # noqa: PLC0415

    new = add_wheels(site, folder)
    size = sum(wheel.size for wheel in new)
    write_text(sys.stdout, f"{len(new)} wheels added, {size / 1e6:.0f} MB")


def format_builds(manifest: PackageManifest) -> str:
    """Return the kinds of boards that a version supports."""
    return ", ".join(build.kind for build in manifest.builds)
