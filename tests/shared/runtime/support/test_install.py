"""What a package lacks is put in place whole, in one step, and checked against the disk before."""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from shared.errors import ConfigError, Unreachable
from shared.runtime.interpreter import NOTE
from shared.runtime.support import command, install
from shared.runtime.support.install import find_extras, folder_name, is_current, require_disk, unpack
from shared.runtime.support.install import install as put
from shared.runtime.support.table import Choice, Row, Wheel, WheelFile
from tests.machine import free_port
from tests.naming import names_all, naming

ROW = Row(systems="boards of a test", machine=("x",), wheels="x-3.11")


def make_wheel(folder: Path, name: str, members: dict[str, str]) -> Wheel:
    """Write a wheel; return what a table says of it."""
    file = f"{name}-1.0-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / file, "w") as packed:
        for path, text in members.items():
            packed.writestr(path, text)
    content = (folder / file).read_bytes()
    return Wheel(file=file, bytes=len(content), unpacked=999, sha256=hashlib.sha256(content).hexdigest())


@pytest.fixture
def stick(tmp_path):
    return tmp_path / "stick"


@pytest.fixture
def choice(stick):
    one = make_wheel(stick, "one", {"one/__init__.py": "VALUE = 1", "one-1.0.dist-info/RECORD": ""})
    return Choice(ROW, (one, make_wheel(stick, "two", {"two.py": "VALUE = 2"})))


def test_wheels_are_unpacked_compiled_and_put_in_use(tmp_path, stick, choice):
    extras, said = tmp_path / "extras", []
    put(choice, "train", extras, [str(stick)], said.append)
    current = extras / "current"
    assert (current / "one/__init__.py").read_text() == "VALUE = 1"
    assert list(current.glob("__pycache__/two.*.pyc"))
    assert is_current(extras, folder_name(choice, "train"))
    assert sorted(path.name for path in extras.iterdir()) == ["current", folder_name(choice, "train")]
    assert (current / "one").stat().st_mode & 0o777 == 0o755


def test_other_wheels_take_their_place_in_one_step(tmp_path, stick, choice):
    extras = tmp_path / "extras"
    put(choice, "infer", extras, [str(stick)], lambda _line: None)
    other = Choice(ROW, (make_wheel(stick, "three", {"three.py": ""}),))
    put(other, "train", extras, [str(stick)], lambda _line: None)
    assert not is_current(extras, folder_name(choice, "infer"))
    assert [path.name for path in (extras / "current").glob("*.py")] == ["three.py"]


def test_what_is_cut_off_leaves_what_was_there(tmp_path, stick, choice, monkeypatch):
    """At each step: while files come, are unpacked, and before the link is moved; then the same again is whole."""
    extras = tmp_path / "extras"
    put(choice, "train", extras, [str(stick)], lambda _line: None)
    other = Choice(ROW, (make_wheel(stick, "three", {"three.py": ""}),))
    for step in ("download_wheels", "unpack", "activate"):
        with monkeypatch.context() as cut:
            cut.setattr(install, step, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                put(other, "train", extras, [str(stick)], lambda _line: None)
        assert is_current(extras, folder_name(choice, "train"))
        assert (extras / "current/two.py").exists()
    put(other, "train", extras, [str(stick)], lambda _line: None)
    assert is_current(extras, folder_name(other, "train"))


def test_libraries_of_a_wheel_s_data_folder_are_libraries_and_scripts_are_not(tmp_path):
    members = {"a-1.data/purelib/a/b.py": "1", "a-1.data/scripts/run": "2", "a-1.data/headers/x.h": "3", "c.py": "4"}
    wheel = make_wheel(tmp_path, "a", members)
    unpack(tmp_path / wheel.file, tmp_path / "out")
    assert {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")} == {"a/b.py", "c.py"}


@pytest.mark.parametrize("path", ["../evil.py", "/evil.py", "a/../../evil.py", "a-1.data/purelib/../../evil.py"])
def test_a_path_that_leads_out_is_refused(tmp_path, path):
    wheel = make_wheel(tmp_path, "a", {path: "1"})
    with pytest.raises(ConfigError, match=naming(wheel.file, repr(path))):
        unpack(tmp_path / wheel.file, tmp_path / "deep" / "out")
    assert not list(tmp_path.rglob("evil.py"))


def test_a_full_disk_is_told_before_anything_comes(tmp_path, choice, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: shutil._ntuple_diskusage(1, 1, 64 << 20))
    with pytest.raises(ConfigError, match=naming("64 MiB", "--from")):
        require_disk(tmp_path / "not/yet/there", choice, downloads=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: shutil._ntuple_diskusage(1, 1, 65 << 20))
    require_disk(tmp_path / "not/yet/there", choice, downloads=True)


def test_a_folder_that_is_root_s_says_so(tmp_path, stick, choice, monkeypatch):
    def denied(*_):
        raise PermissionError(13, "Permission denied", "/opt/x")

    monkeypatch.setattr(install, "download_wheels", denied)
    with pytest.raises(ConfigError, match=naming("/opt/x", "Permission denied")):
        put(choice, "train", tmp_path / "extras", [str(stick)], lambda _line: None)


def test_a_clone_is_told_of_pip():
    with pytest.raises(ConfigError, match=naming(sys.prefix, "pip install")):
        find_extras()


@pytest.fixture
def packaged(tmp_path, choice, monkeypatch):
    """Return the folder that a package's Python looks into, on a system that takes the test's wheels."""
    extras = tmp_path / "opt/extras"
    monkeypatch.setattr(command, "find_extras", lambda: extras)
    monkeypatch.setattr(command, "read_wheels", lambda: WheelFile(wheels=choice.wheels, sets={}))
    monkeypatch.setattr(command, "read_table", lambda: None)
    monkeypatch.setattr(command, "this_system", lambda: None)
    found = {"train": choice, "server": choice, "infer": Choice(ROW, choice.wheels[1:])}
    monkeypatch.setattr(command, "choose", lambda _table, _sets, _system, purpose: found[purpose])
    return extras


def told(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_says_the_size_brings_it_and_knows_it_again(packaged, stick):
    said: list[str] = []
    assert command.set_up("train", told("--from", str(stick), "--anyway"), said.append) == 0
    assert names_all(said[0], "boards of a test", "PyTorch", "ONNX Runtime", 2, "0 MB")
    assert names_all(said[-1], "PyTorch", "ONNX Runtime")
    brought = len(said)
    assert command.set_up("train", told("--anyway"), said.append) == 0
    first = said[brought:]
    assert command.set_up("infer", told("--anyway"), said.append) == 0  # what trains serves, too
    assert first[-1] == said[-1]
    assert "already there" in first[-1], "the Ansible roles match this text"
    assert len(said) == brought + 2 * len(first)
    assert len(first) < brought


def test_a_folder_alone_is_not_helped_by_a_network(packaged, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "find_usual_index", lambda: pytest.fail("asked"))
    with pytest.raises(ConfigError, match=naming(tmp_path, "--from")):
        command.set_up("train", told("--from", str(tmp_path), "--anyway"))


def test_the_list_is_what_sha256sum_checks(packaged, choice):
    said: list[str] = []
    command.set_up("train", told("--list"), said.append)
    assert said == [f"{one.sha256}  {one.file}" for one in choice.wheels]
    assert not packaged.exists()


class _Index(BaseHTTPRequestHandler):
    """An index by its `pages`; answers `absent` for every other path, as PyTorch's own answers 403."""

    pages: ClassVar[dict[str, bytes]]
    absent: ClassVar[int]
    asked: ClassVar[list[str]]

    def do_GET(self):
        self.asked.append(self.path)
        body = self.pages.get(self.path)
        self.send_response(self.absent if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_):
        pass


@contextmanager
def index(pages: dict[str, bytes], absent: int) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    handler = type("Index", (_Index,), {"pages": pages, "absent": absent, "asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def page_of(stick: Path, wheel: Wheel) -> dict[str, bytes]:
    file = f"/files/{wheel.file}"
    return {f"/{wheel.name}/": f'<a href="{file}">{wheel.file}</a>'.encode(), file: (stick / wheel.file).read_bytes()}


def test_setup_takes_torch_from_the_row_s_index_without_any_option(packaged, monkeypatch, stick, choice):
    """pip's own index has a CUDA build of torch alone; the row's index has only the torch that is wanted."""
    one, torch = choice.wheels
    cuda = {f"/{torch.name}/": b'<a href="/files/other.whl">other.whl</a>'}
    monkeypatch.delenv(command.TORCH_INDEX, raising=False)
    with index(page_of(stick, one) | cuda, 404) as (usual, _), index(page_of(stick, torch), 403) as (cpu, asked):
        monkeypatch.setattr(command, "find_usual_index", lambda: usual)
        row = Row(systems="PCs", machine=("x",), wheels="x-3.11", index=cpu)
        monkeypatch.setattr(command, "choose", lambda *_: Choice(row, choice.wheels))
        assert command.set_up("train", told("--anyway"), lambda _line: None) == 0
    assert asked == [f"/{torch.name}/", f"/files/{torch.file}"]
    assert sorted(path.name for path in (packaged / "current").glob("[a-z]*")) == ["one", "one-1.0.dist-info", "two.py"]


def test_an_index_of_the_row_that_cannot_be_reached_is_named_with_a_way(packaged, monkeypatch, stick, choice):
    """As NVIDIA's for JetPack 6, from a board without internet; nothing is put in place, and the way works."""
    one, torch = choice.wheels
    monkeypatch.delenv(command.TORCH_INDEX, raising=False)
    row = Row(systems="Jetsons", machine=("x",), wheels="x-3.11", index=f"http://127.0.0.1:{free_port()}/jp6/cu126")
    monkeypatch.setattr(command, "choose", lambda *_: Choice(row, choice.wheels))
    with index(page_of(stick, one), 404) as (usual, _):
        monkeypatch.setattr(command, "find_usual_index", lambda: usual)
        with pytest.raises(
            Unreachable, match=naming(f"/jp6/cu126/{torch.name}/", "Connection refused", "--list", "--from")
        ):
            command.set_up("train", told("--anyway"), lambda _line: None)
    assert not (packaged / "current").exists()
    assert command.set_up("train", told("--anyway", "--from", str(stick)), lambda _line: None) == 0
    assert (packaged / "current").is_dir()


def test_what_was_brought_notes_its_python(packaged, stick, choice, monkeypatch):
    """By it the agent knows after an upgrade of the system that it is for another Python."""
    monkeypatch.setattr(command, "choose", lambda *_: Choice(ROW, choice.wheels, "/usr/bin/python3.10"))
    assert command.set_up("train", told("--anyway", "--from", str(stick)), lambda _line: None) == 0
    assert (packaged / "current" / NOTE).read_text() == "/usr/bin/python3.10\n"


def test_an_index_that_forbids_unknown_projects_is_followed_by_the_next(packaged, monkeypatch, stick, choice):
    """`--index https://download.pytorch.org/whl/cpu` must not fail for what only pip's own index has."""
    one, torch = choice.wheels
    with index(page_of(stick, one), 404) as (usual, _), index(page_of(stick, torch), 403) as (cpu, _):
        monkeypatch.setattr(command, "find_usual_index", lambda: usual)
        assert command.set_up("train", told("--anyway", "--index", cpu), lambda _line: None) == 0
    assert (packaged / "current/one/__init__.py").exists()


def test_pip_is_asked_for_its_index(monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://gateway.local:8443/packages/simple")
    assert command.find_usual_index() in ("https://gateway.local:8443/packages/simple", command.USUAL_INDEX)
