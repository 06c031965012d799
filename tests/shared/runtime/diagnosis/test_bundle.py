"""What a bundle has, and what it must not have."""

from __future__ import annotations

import json
import os
import tarfile

import pytest

from shared.errors import ConfigError
from shared.runtime.diagnosis.bundle import (
    last_lines,
    list_files,
    read_secret_lines,
    running_versions,
    without_secrets,
    write_bundle,
)
from tests.naming import naming


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("password: hunter2 and more", "hunter2"),
        ('  "secret": "abc def",', "abc def"),
        ("passwd='x y z'", "x y z"),
        ("-----BEGIN PRIVATE KEY-----\nMIGH\nabc\n-----END PRIVATE KEY-----\nleft", "abc"),
        ("-----BEGIN PRIVATE KEY-----\nMIGH", "MIGH"),
        ("device-agent join ff1,gw:8443,AAAA,aa,SSSS", "SSSS"),
        ("url = http://me:word@192.0.2.7/x", "word"),
        ("url = http://me:word@192.0.2.7/x", "192.0.2.7"),
        (f"on {os.uname().nodename} today", f"on {os.uname().nodename} "),
    ],
)
def test_what_looks_secret_is_taken_out(text, gone):
    assert gone not in without_secrets(text)


def test_what_is_known_to_be_secret_is_taken_out_wherever_it_stands(tmp_path):
    (tmp_path / "word").write_text("correct horse\n")
    (tmp_path / "key").write_text("-----BEGIN PRIVATE KEY-----\nMIGHxyz\n-----END PRIVATE KEY-----\n")
    words = read_secret_lines([tmp_path / "word", tmp_path / "key", tmp_path / "none"])
    assert words == {"correct horse", "MIGHxyz"}
    assert without_secrets("is it correct horse, or MIGHxyz?", words) == "is it (secret), or (secret)?"


@pytest.mark.parametrize(
    "text", ["round 2/2: 3 updates, loss 0.5", "/var/lib/fieldfleet/state: 12 MiB free", "password_file is there", ""]
)
def test_what_tells_no_secret_stays(text):
    assert without_secrets(text) == text


def test_a_bundle_is_for_its_user_alone_and_its_json_stays_json(tmp_path):
    path = tmp_path / "bundle.tar.gz"
    found = [{"about": "broker", "told": "password: hunter2", "password": "hunter2", "count": 3}]
    write_bundle(path, {"doctor.json": found, "log.txt": "hello\n"}, {"hunter2"})
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["bundle/doctor.json", "bundle/log.txt"]
        told = archive.extractfile("bundle/doctor.json")
        assert told
        assert json.loads(told.read()) == [{"about": "broker", "told": "password: -", "password": "-", "count": 3}]
    with pytest.raises(ConfigError, match=naming(path)):
        write_bundle(path, {})
    with pytest.raises(ConfigError):
        write_bundle(tmp_path / "none" / "bundle.tar.gz", {})


def test_the_end_of_a_log_and_the_names_of_files(tmp_path):
    (tmp_path / "log").write_text("".join(f"line {number}\n" for number in range(3000)))
    lines = last_lines(tmp_path / "log").splitlines()
    assert (len(lines), lines[-1]) == (1000, "line 2999")
    with pytest.raises(ConfigError):
        last_lines(tmp_path / "none")
    (tmp_path / "key").touch(mode=0o600)
    assert "-rw-------            0 key\n" in list_files(tmp_path)
    assert {"python", "machine", "msgspec"} <= running_versions().keys()
