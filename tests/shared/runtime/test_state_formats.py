"""State file formats: downgrade warnings, permissions, unknown files."""

from __future__ import annotations

import stat

import pytest

from shared.errors import ConfigError
from shared.runtime.state_formats import (
    FILE,
    MOST_BYTES,
    StateKind,
    encode_formats,
    find_losses,
    raise_formats,
    read_formats,
    require_readable,
)
from tests.naming import naming

KINDS = {"ledger": StateKind(("ledger",), "what is owed")}


def test_forms_only_rise_and_the_version_is_that_which_raised_one_last(tmp_path):
    assert read_formats(tmp_path / "none").formats == {}
    assert raise_formats(tmp_path, "2", {"ledger": 2})
    assert not raise_formats(tmp_path, "1", {"ledger": 1})
    assert raise_formats(tmp_path, "1", {"ledger": 1, "log": 1})
    assert (read_formats(tmp_path).formats, read_formats(tmp_path).version) == ({"ledger": 2, "log": 1}, "1")


def test_a_form_that_is_not_known_is_refused_with_what_to_do(tmp_path):
    raise_formats(tmp_path, "", {"ledger": 2, "moon": 9})
    require_readable(tmp_path, {"ledger": 2}, KINDS, "")
    with pytest.raises(ConfigError, match=naming(tmp_path, "ledger", KINDS["ledger"].holds, "burn it")):
        require_readable(tmp_path, {"ledger": 1}, KINDS, "burn it")
    assert list(find_losses({"moon": 9}, {"moon": 8}, KINDS)) == ["moon"]


def test_where_several_users_work_all_may_read_it(tmp_path):
    raise_formats(tmp_path, "1", {"ledger": 1}, several=True)
    about, owner = (tmp_path / FILE).stat(), tmp_path.stat()
    assert (stat.S_IMODE(about.st_mode), about.st_uid, about.st_gid) == (0o644, owner.st_uid, owner.st_gid)
    assert list(tmp_path.iterdir()) == [tmp_path / FILE]


@pytest.mark.parametrize("data", [b"", b"[]", b'{"formats":{"ledger":"x"}}', b"[" * 9_999, b" " * (MOST_BYTES + 1)])
def test_what_is_no_table_of_forms_is_refused(tmp_path, data):
    (tmp_path / FILE).write_bytes(data)
    with pytest.raises(ConfigError, match=naming(tmp_path / FILE)):
        read_formats(tmp_path)


def test_a_folder_in_its_place_is_refused_and_a_file_in_place_of_the_folder_has_none(tmp_path):
    (tmp_path / FILE).mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        read_formats(tmp_path)
    (tmp_path / "file").write_bytes(encode_formats({}, ""))
    assert read_formats(tmp_path / "file").formats == {}
