"""What a gateway offers to its boards: packages taken in, signed, listed, and found damaged where they are."""

from __future__ import annotations

import asyncio
import json
import lzma
import stat
import threading
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from device_agent.upgrade import state_formats
from edge_server.__main__ import build_parser
from edge_server.cli.gateway.packages import packages
from edge_server.gateway.check import check_site
from edge_server.gateway.initialise import SiteSettings, initialise
from edge_server.gateway.packages.deb import DebFacts, read_deb
from edge_server.gateway.packages.store import (
    INDEX,
    PACKAGES,
    WHEELS,
    PackageIndex,
    add_packages,
    add_wheels,
    find_package_faults,
    read_index,
    remove_packages,
)
from edge_server.gateway.site_folder import SiteFolder
from edge_server.gateway.state import lock_site, read_state
from shared.errors import ConfigError
from shared.protocol.packages import find_build, verify
from tests.edge_server.gateway.sites import archive, deb, packed, put_deb
from tests.naming import names_all, naming

NOW = datetime(2026, 11, 23, tzinfo=UTC)


@pytest.fixture
def site(tmp_path):
    folder = SiteFolder(tmp_path / "site")
    initialise(folder, SiteSettings("roof", ("gateway.local",)), NOW)
    return folder


def run(*words):
    return packages(build_parser().parse_args(["packages", *map(str, words)]))


def test_a_package_says_what_it_is(tmp_path):
    path = put_deb(tmp_path, "0.4.0", "arm64", "3.13")
    assert read_deb(path) == DebFacts("0.4.0", "arm64", "3.13", {"journal": 1, "releases": 2})


def test_a_version_from_before_there_were_forms_of_state(tmp_path):
    path = put_deb(tmp_path, formats="")
    assert read_deb(path).formats == {}


BROKEN = {
    "nothing": b"",
    "no-archive": b"#!/bin/sh\n" * 20,
    "cut": deb()[:-100],
    "cut-early": deb()[:400],
    "leads-out": deb("../../etc"),
    "no-data": archive({"debian-binary": b"2.0\n", "control.tar.xz": packed({"./control": "Package: x\n"})}),
    "server": deb(name="fieldfleet-server"),
    "other-processor": deb(arch="riscv64"),
    "no-tar": archive({"debian-binary": b"2.0\n", "control.tar.xz": b"x" * 99, "data.tar.xz": b"y" * 99}),
    "formats-none": deb(formats="FORMATS = ["),
    "formats-that-run": deb(formats="FORMATS = __import__('os').system('false')\n"),
    "formats-of-words": deb(formats="FORMATS = {'journal': 'new'}\n"),
    "formats-no-table": deb(formats="FORMATS = 3\n"),
    "formats-of-lists": deb(formats="FORMATS = {'journal': []}\n"),
    "formats-of-numbers": deb(formats="FORMATS = {3: 3}\n"),
    "formats-under-a-list": deb(formats="FORMATS = {[]: 3}\n"),
    "formats-deep": deb(formats=f"FORMATS = {'-' * 100_000}1\n"),
    "formats-long": deb(formats=f"FORMATS = {{'journal': {'9' * 9_000}}}\n"),
    "formats-not-text": deb(filling=b"", formats=b"\xff\xfe"),
    "control-is-a-link": archive(
        {"debian-binary": b"2.0\n", "control.tar.xz": packed({}, {"./control": "gone"}), "data.tar.xz": packed({})}
    ),
    "control-is-long": deb(name="x" * (1 << 17)),
    "bomb": archive(
        {"debian-binary": b"2.0\n", "control.tar.xz": lzma.compress(bytes(1 << 16)), "data.tar.xz": packed({})}
    ),
    "formats-below-zero": deb(formats="FORMATS = {'journal': -1}\n"),
    "size-none": b"!<arch>\n" + b"control.tar.xz".ljust(48) + b"-12".ljust(10) + b"`\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_package_of_the_agent_is_refused_and_nothing_is_taken_in(site, tmp_path, name):
    path = tmp_path / f"{name}.deb"
    path.write_bytes(BROKEN[name])
    with pytest.raises(ConfigError, match=naming(path.name)):
        add_packages(site, [put_deb(tmp_path / "good", "0.3.9"), path])
    assert read_index(site.path) == PackageIndex()


def test_the_table_of_this_very_agent_is_read(tmp_path):
    source = (Path(state_formats.__file__)).read_text()
    assert read_deb(put_deb(tmp_path, formats=source)).formats == dict(state_formats.FORMATS)


def test_packages_of_one_version_are_signed_together_and_boards_find_theirs(site, tmp_path):
    paths = [put_deb(tmp_path, arch=arch, filling=arch.encode()) for arch in ("arm64", "amd64")]
    [manifest] = add_packages(site, paths)
    assert (manifest.version, manifest.serial, manifest.site) == ("0.4.0", 1, "roof")
    assert manifest.formats == {"journal": 1, "releases": 2}
    [signed] = read_index(site.path).releases
    assert verify(signed, site.ca("root.crt").read_bytes()) == manifest
    for path, arch in zip(paths, ("arm64", "amd64"), strict=True):
        build = find_build(manifest, arch, "3.11")
        kept = site.path / PACKAGES / build.file
        assert kept.read_bytes() == path.read_bytes()
        assert stat.S_IMODE(kept.stat().st_mode) == 0o644
    assert list(find_package_faults(site.path)) == []


MANY = "3.10~), python3 (<< 3.15"
"""As `make deb` names the Pythons of a package in `Depends`."""


def test_one_package_is_for_boards_of_several_pythons(site, tmp_path):
    """Boards of an older agent do not know such manifests, and are told to install by apt."""
    path = put_deb(tmp_path, "0.5.0", "arm64", MANY)
    assert read_deb(path).python == "3.10 3.11 3.12 3.13 3.14"
    [manifest] = add_packages(site, [path])
    assert manifest.format == 2
    [build] = manifest.builds
    assert build.file == "fieldfleet-agent_0.5.0_py3.10-3.14_arm64.deb"
    assert names_all(build.kind, "arm64", "3.10", "3.14")
    for python in ("3.10", "3.12", "3.14"):
        assert find_build(manifest, "arm64", python) == build
    with pytest.raises(ConfigError, match=naming("0.5.0", "arm64", "3.10", "3.14", "3.15")):
        find_build(manifest, "arm64", "3.15")
    overlapping = put_deb(tmp_path, "0.5.0", "arm64", "3.11")
    with pytest.raises(ConfigError, match=naming(overlapping.name)):
        add_packages(site, [overlapping])


def test_a_package_cannot_claim_every_python(tmp_path):
    assert len(read_deb(put_deb(tmp_path, python="3.10~), python3 (<< 3.99")).python.split()) == 10


def test_versions_are_counted_and_no_number_comes_twice(site, tmp_path):
    for version in ("0.4.0", "0.4.1"):
        add_packages(site, [put_deb(tmp_path, version)])
    add_packages(site, [put_deb(tmp_path, "0.4.0", "amd64")])  # one more of a version that is there
    assert [(one.version, one.serial, len(one.builds)) for one in read_index(site.path).manifests()] == [
        ("0.4.0", 1, 2),
        ("0.4.1", 2, 1),
    ]
    remove_packages(site, "0.4.1")
    [again] = add_packages(site, [put_deb(tmp_path, "0.4.1")])
    assert again.serial == 3


def test_the_same_package_again_changes_nothing(site, tmp_path):
    path = put_deb(tmp_path)
    add_packages(site, [path])
    before = read_index(site.path)
    add_packages(site, [path])
    assert read_index(site.path) == before


def test_a_version_never_changes(site, tmp_path):
    add_packages(site, [put_deb(tmp_path)])
    [stored] = (site.path / PACKAGES).glob("*.deb")
    with pytest.raises(ConfigError, match=naming(stored.name)):
        add_packages(site, [put_deb(tmp_path, filling=b"another")])
    with pytest.raises(ConfigError, match=naming("fieldfleet-agent_0.4.0_py3.11_amd64.deb", "0.4.0")):
        add_packages(site, [put_deb(tmp_path, arch="amd64", formats="FORMATS = {'journal': 9}\n")])
    assert list(find_package_faults(site.path)) == []


def test_what_is_removed_is_gone_and_what_is_not_there_is_told(site, tmp_path):
    add_packages(site, [put_deb(tmp_path)])
    remove_packages(site, "0.4.0")
    assert [path.name for path in (site.path / PACKAGES).iterdir()] == [INDEX]
    with pytest.raises(ConfigError, match=naming("0.4.0", "edge-server packages add")):
        remove_packages(site, "0.4.0")


def test_wheels_are_taken_in_once_and_never_change(site, tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("torch-2.10.0-cp311-cp311-manylinux_2_28_aarch64.whl", "numpy-2.4.6-py3-none-any.whl"):
        (folder / name).write_bytes(name.encode())
    assert len(add_wheels(site, folder)) == 2
    assert add_wheels(site, folder) == []
    assert [one.file[:5] for one in read_index(site.path).wheels] == ["numpy", "torch"]
    (folder / "numpy-2.4.6-py3-none-any.whl").write_bytes(b"another")
    with pytest.raises(ConfigError, match=naming(folder / "numpy-2.4.6-py3-none-any.whl")):
        add_wheels(site, folder)
    with pytest.raises(ConfigError, match=naming(tmp_path / "nothing")):
        add_wheels(site, tmp_path / "nothing")


def test_faults_of_files_and_signatures_are_found(site, tmp_path):
    add_packages(site, [put_deb(tmp_path)])
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a-1-py3-none-any.whl").write_bytes(b"whole")
    add_wheels(site, tmp_path / "wheels")
    folder = site.path / PACKAGES
    (folder / WHEELS / "a-1-py3-none-any.whl").write_bytes(b"half")
    [path] = folder.glob("*.deb")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert [told for told, _ in find_package_faults(site.path)] == [
        f"{PACKAGES}/{path.name}",
        f"{PACKAGES}/{WHEELS}/a-1-py3-none-any.whl",
    ]
    data = json.loads((folder / INDEX).read_text())
    data["releases"][0]["signature"] = "AAAA"
    (folder / INDEX).write_text(json.dumps(data))
    assert (f"{PACKAGES}/0.4.0") in [told for told, _ in find_package_faults(site.path)]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format":2}', '{"releases":[{"manifest":"AAAA","signature":"","certificates":""}]}']
)
def test_an_index_that_is_none_says_so(site, text):
    (site.path / PACKAGES).mkdir()
    (site.path / PACKAGES / INDEX).write_text(text)
    with pytest.raises(ConfigError, match=naming(site.path / PACKAGES / INDEX)):
        read_index(site.path)


def test_a_site_from_before_there_were_packages_gets_its_signer_by_init(site, tmp_path):
    """Files and state as a fieldfleet before packages left them: `site init` makes what signs, and no more."""
    for ending in ("key", "crt"):
        site.gateway(f"packages.{ending}").unlink()
    state = json.loads((site.path / "state.json").read_text())
    accounts = {name: account for name, account in read_state(site.path).accounts.items() if name != "_packages"}
    state |= {"version": 1, "accounts": msgspec.to_builtins(accounts)}  # which had them in the same file
    (site.path / "accounts.sqlite").unlink()
    (site.path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=naming("packages.key", "edge-server site init")):
        add_packages(site, [put_deb(tmp_path)])
    again = SiteFolder(site.path)
    initialise(again, SiteSettings(), NOW)
    assert sorted(again.changed) == ["gateway/packages.crt", "gateway/packages.key"]
    assert "_packages" in read_state(site.path).accounts
    assert add_packages(again, [put_deb(tmp_path)])


def test_site_check_looks_at_them(site, tmp_path):
    def told():
        findings = asyncio.run(check_site(site, NOW))
        return [(one.state, one.told) for one in findings if one.about.startswith("packages")]

    assert told() == []
    add_packages(site, [put_deb(tmp_path)])
    [(state, words)] = told()
    assert (state, names_all(words, "0.4.0")) == ("good", True)
    [path] = (site.path / PACKAGES).glob("*.deb")
    path.unlink()
    assert [state for state, _ in told()] == ["bad"]


def test_the_command_adds_lists_and_removes(site, tmp_path, capsys):
    folder = ("--folder", site.path)
    assert run("list", *folder) == 0
    assert "packages add" in capsys.readouterr().out
    assert run("add", put_deb(tmp_path), put_deb(tmp_path, arch="amd64"), *folder) == 0
    assert names_all(capsys.readouterr().out, "0.4.0", "amd64", "arm64", "roof")
    assert run("list", *folder) == 0
    assert names_all(capsys.readouterr().out, "0.4.0", "amd64", "arm64", "3.11")
    assert run("list", "--format", "json", *folder) == 0
    [release] = msgspec.json.decode(capsys.readouterr().out)["releases"]
    assert release["version"] == "0.4.0"
    assert run("remove", "0.4.0", *folder) == 0
    assert read_index(site.path).releases == ()


def test_two_who_add_at_once_take_turns(site, tmp_path):
    """Who holds the lock is waited for, so that no manifest is lost; here it is seen that the lock is taken."""
    done = threading.Event()

    def add():
        add_packages(site, [put_deb(tmp_path)])
        done.set()

    with lock_site(site.path, ".packages.lock"):
        adding = threading.Thread(target=add)
        adding.start()
        assert not done.wait(0.2)
    adding.join(60)
    assert done.is_set()
