"""The profiles that are shipped: well formed, documented, and each for its own boards only."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from device_agent.profile.check import ZONE_ROLES, find_conflicts, find_problems
from device_agent.profile.load import UNKNOWN_PROFILE, load_all, load_file, load_for_board, read_identity
from device_agent.profile.match import choose_profile, is_match
from device_agent.profile.schema import Profile
from shared.errors import ConfigError
from tests.machine import grow, shared
from tests.naming import naming

JETSONS = "nano tx1 tx2 tx2-nx xavier-nx agx-xavier orin-nano orin-nano-super orin-nx agx-orin agx-thor"
PIS = "3b 3b-plus 4b 5 zero-2w"
BOARDS = {*(f"jetson-{one}" for one in JETSONS.split()), *(f"raspberry-pi-{one}" for one in PIS.split())}
GENERIC = {"generic-arm", "generic-x86", "generic-jetson", "generic-raspberry-pi"}
FOLDER = resources.files("firmware_profiles")
SHIPPED = sorted(file.name.removesuffix(".toml") for file in FOLDER.iterdir() if file.name.endswith(".toml"))
ARM, X86 = "processor\t: 0\nCPU implementer\t: 0x41", "processor\t: 0\nvendor_id\t: GenuineIntel"
RECORDED = [
    ("jetson-agx-orin", "dt_compatible_4ax9.txt", "jetson-agx-orin"),
    ("jetson-agx-xavier", "dt_compatible_4ebH.txt", "jetson-agx-xavier"),
    ("jetson-nano", "dt_compatible_4rLX.txt", "jetson-nano"),
    ("jetson-orin-nano", "dt_compatible_4Ebd.txt", "jetson-orin-nano"),
    ("jetson-orin-nano", "dt_compatible_4vy7.txt", "jetson-orin-nano"),
    ("jetson-orin-nano", "dt_compatible_87lq.txt", "jetson-orin-nano-super"),
    ("jetson-xavier-nx", "dt_compatible_3YWp.txt", "jetson-xavier-nx"),
    ("rpi-4b", "dt_compatible_4pzj.txt", "raspberry-pi-4b"),
    ("rpi-5", "dt_compatible_8-NK.txt", "raspberry-pi-5"),
    ("rpi-5", "dt_compatible_8acvqG.txt", "raspberry-pi-5"),
]
DEVICE_TREES = {
    "nvidia,p2597-0000+p3310-1000 nvidia,tegra186": "jetson-tx2",
    "nvidia,quill nvidia,p2597-0000+p3310-1000 nvidia,tegra186": "jetson-tx2",
    "nvidia,p2597-0000+p3489-0000 nvidia,tegra186": "jetson-tx2",
    "nvidia,storm nvidia,tegra186": "jetson-tx2",
    "nvidia,storm nvidia,p2597-0000+p3489-0000 nvidia,tegra186": "jetson-tx2",
    "nvidia,p2597-0000+p3489-0888 nvidia,tegra186": "jetson-tx2",
    "nvidia,lightning nvidia,tegra186": "jetson-tx2",
    "nvidia,p2771-0000 nvidia,tegra186": "jetson-tx2",
    "nvidia,p3509-0000+p3636-0001 nvidia,tegra186": "jetson-tx2-nx",
    "nvidia,p2597-0000+p2180-1000 nvidia,jetson-cv nvidia,tegra210": "jetson-tx1",
    "nvidia,p2371-2180 nvidia,tegra210": "jetson-tx1",
    "nvidia,p3449-0000-a02+p3448-0000-a02 nvidia,jetson-nano nvidia,tegra210": "jetson-nano",
    "nvidia,p3449-0000-b00+p3448-0002-b00 nvidia,tegra210": "jetson-nano",
    "nvidia,p3542-0000+p3448-0003 nvidia,jetson-nano-2gb nvidia,tegra210": "jetson-nano",
    "nvidia,p3509-0000+p3668-0001 nvidia,tegra194": "jetson-xavier-nx",
    "lenovo,thinkedge-se70 nvidia,p3668-0001 nvidia,tegra194": "jetson-xavier-nx",
    "nvidia,p3449-0000+p3668-0003 nvidia,tegra194": "jetson-xavier-nx",
    "nvidia,p2822-0000+p2888-0006 nvidia,tegra194": "jetson-agx-xavier",
    "nvidia,p2972-0006 nvidia,tegra194": "jetson-agx-xavier",
    "nvidia,galen-industrial nvidia,jetson-xavier-industrial nvidia,tegra194": "jetson-agx-xavier",
    "nvidia,e3900-0000+p2888-0004 nvidia,tegra194": "jetson-agx-xavier",
    "nvidia,p3509-0000+p3767-0000 nvidia,tegra234": "jetson-orin-nx",
    "nvidia,p3768-0000+p3767-0001 nvidia,p3767-0001 nvidia,tegra234": "jetson-orin-nx",
    "nvidia,p3768-0000+p3767-0000-super nvidia,p3767-0000 nvidia,tegra234": "jetson-orin-nx",
    "nvidia,p3509-0000+p3767-0004 nvidia,tegra234": "jetson-orin-nano",
    "nvidia,p3768-0000+p3767-0005 nvidia,p3767-0005 nvidia,tegra234": "jetson-orin-nano",
    "nvidia,p3509-0000+p3767-0005-super nvidia,p3767-0005 nvidia,tegra234": "jetson-orin-nano-super",
    "nvidia,p3768-0000+p3767-0004-super nvidia,tegra234": "jetson-orin-nano-super",
    "nvidia,p3737-0000+p3701-0008 nvidia,p3701-0008 nvidia,tegra234": "jetson-agx-orin",
    "nvidia,p3740-0002+p3701-0008 nvidia,tegra234": "jetson-agx-orin",
    "nvidia,p3737-0000+p3701-0005 nvidia,tegra234": "jetson-agx-orin",
    "nvidia,p4071-0000+p3834-0008 nvidia,p3834-0008 nvidia,tegra264": "jetson-agx-thor",
    "nvidia,p3971-0050+p3834-0005 nvidia,tegra264": "jetson-agx-thor",
    "nvidia,p3740-0002+p3701-0002 nvidia,tegra234": "jetson-agx-orin",
    "nvidia,p3740-0002 nvidia,tegra234": "jetson-agx-orin",
    "nvidia,p3737-0000+p3701-0099 nvidia,tegra234": "jetson-agx-orin",
    "nvidia,p3740-0002+p3834-0008 nvidia,tegra264": "jetson-agx-thor",
    "nvidia,p2822-0000+p2888-0003 nvidia,tegra194": "jetson-agx-xavier",
    "nvidia,p2888-0099 nvidia,tegra194": "jetson-agx-xavier",
    "nvidia,e3900-0000 nvidia,tegra194": "jetson-agx-xavier",
    "nvidia,p3768-0000+p3767-0099 nvidia,tegra234": "generic-jetson",
    "acme,carrier nvidia,tegra234": "generic-jetson",
    "raspberrypi,3-compute-module brcm,bcm2837": "raspberry-pi-3b",
    "raspberrypi,3-compute-module-lite brcm,bcm2837": "raspberry-pi-3b",
    "raspberrypi,3-model-a-plus brcm,bcm2837": "raspberry-pi-3b-plus",
    "raspberrypi,4-compute-module brcm,bcm2711": "raspberry-pi-4b",
    "raspberrypi,4-compute-module kunbus,revpi-connect-4": "raspberry-pi-4b",
    "raspberrypi,4-compute-module-s brcm,bcm2711": "raspberry-pi-4b",
    "raspberrypi,400 brcm,bcm2711": "raspberry-pi-4b",
    "raspberrypi,500 brcm,bcm2712": "raspberry-pi-5",
    "raspberrypi,5-compute-module brcm,bcm2712d0": "raspberry-pi-5",
    "raspberrypi,model-zero-2-w brcm,bcm2837": "raspberry-pi-zero-2w",
    "raspberrypi,2-model-b brcm,bcm2836": "generic-raspberry-pi",
}
"""What device trees of vendors say: L4T, Linux, and the firmware of a Raspberry Pi; the profile files say whose."""


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    return load_all()


def board(root: Path, *tokens: str, cpuinfo: str = ARM) -> Path:
    return grow(root, {"proc/device-tree/compatible": "\0".join(tokens) + "\0", "proc/cpuinfo": cpuinfo})


def test_every_board_of_the_project_has_one(profiles):
    """All are read, and so checked: one that holds a rail and its parent in a total would not be here."""
    assert profiles.keys() >= BOARDS | GENERIC
    assert find_conflicts(profiles) == ()
    assert {id_: find_problems(profile) for id_, profile in profiles.items() if find_problems(profile)} == {}
    assert all(profile.id == id_ for id_, profile in profiles.items())


@pytest.mark.parametrize("id_", SHIPPED)
def test_each_token_chooses_its_own_profile_and_no_other_boards(tmp_path, profiles, id_):
    """A board that has that token alone; only the fallback would take it, too."""
    for token in profiles[id_].match.compatible:
        root = board(tmp_path, token)
        assert load_for_board(root).id == id_
        assert {one for one, profile in profiles.items() if is_match(profile, read_identity(root))} == {
            id_,
            "generic-arm",
        }


@pytest.mark.parametrize(("tokens", "id_"), DEVICE_TREES.items())
def test_what_vendors_trees_say_chooses_the_modules_profile(tmp_path, profiles, tokens, id_):
    """On whatever carrier; by parsing only the likely files, and by parsing all of them."""
    root = board(tmp_path, *tokens.split())
    assert load_for_board(root).id == id_
    chosen = choose_profile(profiles.values(), read_identity(root))
    assert chosen
    assert chosen.id == id_


def test_of_two_modules_the_one_named_first_counts(tmp_path):
    """Overlays name several; a board that does is no reason to refuse to run."""
    assert load_for_board(board(tmp_path, "nvidia,p3767-0000", "nvidia,p3767-0003")).id == "jetson-orin-nx"


@pytest.mark.parametrize("id_", SHIPPED)
def test_every_token_of_a_board_says_where_it_is_from(id_):
    """By a comment in its line; the chips of the families by one above them."""
    lines = (FOLDER / f"{id_}.toml").read_text().splitlines()
    tokens = [line for line in lines if re.match(r'(compatible = \[)?\s*"[a-z]+,', line)]
    assert tokens or id_.startswith("generic-")
    assert [line for line in tokens if "#" not in line and not id_.startswith("generic-")] == []


@pytest.mark.parametrize(("folder", "name", "id_"), RECORDED)
def test_a_recorded_board_gets_its_profile(tmp_path, profiles, folder, name, id_):
    """By parsing only the likely files, and by parsing all of them."""
    root = board(tmp_path, *shared("reference", "boards", folder, name).read_text().split())
    assert load_for_board(root).id == id_
    chosen = choose_profile(profiles.values(), read_identity(root))
    assert chosen
    assert chosen.id == id_


@pytest.mark.parametrize(
    ("cpuinfo", "id_"),
    [(ARM, "generic-arm"), (X86, "generic-x86"), ("hart\t: 0", UNKNOWN_PROFILE.id)],
    ids=["arm", "x86", "riscv"],
)
def test_a_board_nobody_described_falls_back(tmp_path, cpuinfo, id_):
    assert load_for_board(board(tmp_path, "acme,board", cpuinfo=cpuinfo)).id == id_


def test_the_model_string_and_parts_of_tokens_choose_nothing(tmp_path):
    """Models are wrong too often, and `raspberrypi,5-model-b` is no part of `raspberrypi,5-model-b-plus`."""
    root = board(tmp_path, "raspberrypi,5-model-b-plus", "raspberrypi,5")
    grow(root, {"proc/device-tree/model": "NVIDIA Jetson AGX Orin\0"})
    assert load_for_board(root).id == "generic-arm"


def test_a_profile_is_named_by_id_or_by_path(tmp_path):
    """Whatever board it is; a name nobody has is answered with those there are."""
    root = board(tmp_path, "raspberrypi,5-model-b")
    assert load_for_board(root, "jetson-nano").id == "jetson-nano"
    mine = tmp_path / "mine.toml"
    mine.write_text('schema = 1\nid = "mine"\nname = "Mine"\n')
    assert load_for_board(root, str(mine)) == load_file(mine) == Profile(schema=1, id="mine", name="Mine")
    with pytest.raises(ConfigError, match=naming("'jetson'", "auto", "generic-arm")):
        load_for_board(root, "jetson")


@pytest.mark.parametrize("id_", SHIPPED)
def test_figures_of_a_model_say_where_they_are_from(id_):
    _, there, model = (FOLDER / f"{id_}.toml").read_text().partition("[power.model]")
    figures = [line for line in model.splitlines() if re.match(r"(idle_w|max_w|core_jou.*|exponent|tx_w) = ", line)]
    assert len(figures) >= 4 or not there
    assert [line for line in figures if "#" not in line] == []


def fields(kind: type) -> set[str]:
    """Return the names of all fields of a struct, and of the structs within it."""
    found = {field.name for field in msgspec.structs.fields(kind)}
    for field in msgspec.json.schema_components([kind])[1].values():
        found |= field.get("properties", {}).keys()
    return found


def test_the_readme_names_every_key_and_no_key_that_is_none():
    text = (FOLDER / "README.md").read_text()
    said = set(re.findall(r"`\[*(?:power\.)?([a-z_0-9]+)\]*`", text))
    assert fields(Profile) - said == set()
    keys = {key for row in re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    assert keys - fields(Profile) == set()
    assert set(ZONE_ROLES) - said == set()


def test_the_readme_tells_the_defaults():
    """Row by row: what it calls the default is what an empty profile has, and no row is missing."""
    text = (FOLDER / "README.md").read_text()
    empty = msgspec.json.decode(msgspec.json.encode(Profile(schema=1, id="x", name="x")))
    sections = re.findall(r"^### `\[(\w+)\]`\n\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    told = {
        section: {
            key: None if default == "none" else tomllib.loads(f"value = {default}")["value"]
            for key, default in re.findall(r"^\| `(\w+)` \| `?([^`|]+?)`? \|", rows, re.MULTILINE)
        }
        for section, rows in sections
    }
    assert told == {name: table for name, table in empty.items() if isinstance(table, dict)}
