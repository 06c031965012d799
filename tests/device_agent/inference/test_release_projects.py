"""Projects of a board's releases: the serving one decides, and what it may return to stays installed."""

from __future__ import annotations

import msgspec

from device_agent.inference.release_projects import retained_projects, served_projects
from shared.protocol.messages import ProjectVersion
from shared.protocol.update import advance, take_offer
from tests.device_agent.inference.releases import light_release, offer_of, put


def with_project(name: str, version: int, project: str):
    manifest, parts = light_release(name, version)
    source = msgspec.structs.replace(manifest.source, project=ProjectVersion(name="air", version=project))
    return msgspec.structs.replace(manifest, source=source), parts


def test_a_release_that_is_rolled_back_takes_its_project_along(tmp_path):
    put(tmp_path, light_release("other", 1), committed=True)
    put(tmp_path, with_project("points", 1, "0.1.0"), committed=True)
    candidate = with_project("points", 2, "0.2.0")
    store = put(tmp_path, candidate)
    both = {ProjectVersion(name="air", version=version) for version in ("0.1.0", "0.2.0")}
    assert (served_projects(store), retained_projects(store)) == ({"air": "0.1.0"}, both)
    record = store.record("points")
    for event in ("verified", "staged", "switched"):
        record = advance(record, event, 0.0)
    store.write(record)
    assert served_projects(store) == {"air": "0.2.0"}  # in its trial
    store.write(advance(record, "worse", 0.0, "latency"))
    assert served_projects(store) == {"air": "0.1.0"}
    (tmp_path / "releases" / "points" / "1.json").write_bytes(b"damaged")
    assert served_projects(store) == {}
    store.write(take_offer(store.record("points"), offer_of(candidate[0], "again"), 0.0))
    assert retained_projects(store) == {ProjectVersion(name="air", version="0.2.0")}
