"""Label 0 means the same on every device of a run: devices that number other classes take no part."""

from __future__ import annotations

import logging

import pytest

from edge_server.journal.records import Noted, RoundOpened
from edge_server.plan.plan import Plan
from shared.errors import ConfigError
from shared.protocol import wire
from shared.protocol.inputs import Inputs
from shared.protocol.messages import Status
from shared.protocol.topics import topic
from tests.edge_server.harness import SITE, Puppet, Site, moved, site, virtual
from tests.naming import log_messages, names_all, naming

pytestmark = pytest.mark.virtual_time

MINE = 'source = "csv"\npath = "away.csv"'


async def arrive(
    here: Site, name: str, classes: list[str] | None, session: int = 1, inputs: Inputs | None = None
) -> Puppet:
    """Connect a device that tells what its classes are called, and how its inputs are prepared."""
    puppet = await here.device(name, online=False)
    instance = f"{name}{session}"
    said = Status(device=name, session=session, instance=instance, online=True, classes=classes, inputs=inputs)
    await here.broker.publish(topic(SITE, name, "status"), wire.encode(said), retain=True)
    return puppet


async def play_round(plan: Plan, *puppets: Puppet) -> list[list[str]]:
    """Do a round's tasks; return what each said of the classes."""
    tasks = [await puppet.task() for puppet in puppets]
    for puppet, task in zip(puppets, tasks, strict=True):
        assert (await puppet.answer(task, moved(plan, 0.1))).verdict == "accepted"
    return [task.assignment.classes for task in tasks]


async def test_a_run_of_devices_that_differ_does_not_begin(tmp_path):
    """The message has both lists, and what helps."""
    async with site(tmp_path, data=MINE) as here:
        await arrive(here, "a", ["cat", "dog"])
        await arrive(here, "b", ["bird", "cat"])
        with pytest.raises(ConfigError, match=naming("b", "bird, cat", "a", "cat, dog", "data.classes")):
            await here.run
        assert not [one for one in here.store.records() if isinstance(one, RoundOpened)]


@pytest.mark.parametrize(
    ("shape", "classes", "named"), [((5,), ["cat", "dog"], ["(5,)", 64]), ((64,), list("abcdefghijk"), [10, 11])]
)
async def test_a_network_that_does_not_fit_what_devices_report_begins_no_round(tmp_path, shape, classes, named):
    """The server has no examples to try it on, and no device is asked."""
    async with site(tmp_path, data=MINE, cohort="min_devices = 1") as here:
        await arrive(here, "a", classes, inputs=Inputs(scale=1.0, shape=shape))
        with pytest.raises(ConfigError, match=naming("model", *named, "[data] of the devices", "device a")):
            await here.run
        assert not [one for one in here.store.records() if isinstance(one, RoundOpened)]


async def test_names_and_numbers_differ(tmp_path):
    async with site(tmp_path, data=MINE) as here:
        await arrive(here, "a", [])
        await arrive(here, "b", ["bird", "cat"])
        with pytest.raises(ConfigError, match=naming("b", "bird, cat", "a")):
            await here.run


async def test_both_unicode_forms_of_a_name_are_one_class(tmp_path):
    """They were refused with two lists that looked the same; agents up to version 0.1 tell names as they are."""
    async with site(tmp_path, rounds=1, data=MINE) as here:
        puppets = [await arrive(here, "a", ["caf\u00e9", "th\u00e9"])]
        puppets.append(await arrive(here, "b", ["cafe\u0301", "the\u0301"]))
        assert await play_round(here.plan, *puppets) == [[], []]
        assert [one.outcome for one in (await here.ended())[1]] == ["aggregated"]


async def test_two_lists_that_print_alike_are_told_apart(tmp_path):
    async with site(tmp_path, data=MINE) as here:
        await arrive(here, "a", ["cat", "dog"])
        await arrive(here, "b", ["c\u0430t", "dog"])
        with pytest.raises(ConfigError, match=naming(r"'c\u0430t', dog", "'cat', dog")):
            await here.run


async def test_names_that_are_digits_are_said_in_every_task(tmp_path):
    """An agent up to version 0.1 tells 01, 02, 03 and numbers them 1, 2, 3, unless its task names them."""
    names = ["01", "02", "03"]
    async with site(tmp_path, rounds=1, data=MINE) as here:
        puppets = [await arrive(here, name, names) for name in "ab"]
        assert await play_round(here.plan, *puppets) == [names, names]
        assert [one.outcome for one in (await here.ended())[1]] == ["aggregated"]


@pytest.mark.parametrize("classes", [None, [], ["cat", "dog"]])
async def test_devices_that_agree_train_and_their_tasks_are_those_of_before(tmp_path, caplog, classes):
    """Agents of before say nothing; then the log says that nobody knows."""
    caplog.set_level(logging.INFO)
    async with site(tmp_path, rounds=1, data=MINE) as here:
        puppets = [await arrive(here, name, classes) for name in "ab"]
        assert await play_round(here.plan, *puppets) == [[], []]
        assert [one.outcome for one in (await here.ended())[1]] == ["aggregated"]
    assert bool(log_messages(caplog, "classes", "a, b")) == (classes is None)


def test_a_device_that_comes_later_with_others_is_left_out_also_after_a_restart(tmp_path):
    """The journal knows what the first ones agreed on; the record says who took no part, and why."""

    async def begin() -> None:
        async with site(tmp_path, rounds=2, data=MINE) as here:
            puppets = [await arrive(here, name, ["cat", "dog"]) for name in "ab"]
            await play_round(here.plan, *puppets)
            await puppets[0].task()

    async def go_on() -> None:
        async with site(tmp_path, rounds=2, data=MINE) as here:
            await arrive(here, "0", ["bird", "cat"])
            puppets = [await arrive(here, name, ["cat", "dog"], session=2) for name in "ab"]
            await play_round(here.plan, *puppets)
            _, rounds = await here.ended()
            assert [one.arrived for one in rounds] == [("a", "b"), ("a", "b")]

    virtual(begin())
    virtual(go_on())


async def test_a_device_that_comes_between_two_rounds_with_others_is_left_out(tmp_path):
    async with site(tmp_path, rounds=2, data=MINE) as here:
        a, b = [await arrive(here, name, ["cat", "dog"]) for name in "ab"]
        tasks = [await a.task(), await b.task()]
        await arrive(here, "c", ["bird", "cat"])
        for puppet, task in zip((a, b), tasks, strict=True):
            await puppet.answer(task, moved(here.plan, 0.1))
        await play_round(here.plan, a, b)
        _, rounds = await here.ended()
        notes = [one.what for one in here.store.records() if isinstance(one, Noted)]
    assert [one.arrived for one in rounds] == [("a", "b"), ("a", "b")]
    [note] = notes
    assert names_all(note, "c", "bird, cat", "cat, dog")


async def test_the_plan_names_the_classes_of_all(tmp_path):
    """Devices that lack some are told the list, one that tells just it is not, one that has others takes no part."""
    planned = f'{MINE}\nclasses = ["dog", "cat", "bird"]'
    async with site(tmp_path, rounds=1, data=planned) as here:
        await arrive(here, "0", ["cat", "eel"])
        puppets = [
            await arrive(here, name, told)
            for name, told in (("a", ["cat", "dog"]), ("b", ["dog", "cat", "bird"]), ("c", []))
        ]
        whole = ["dog", "cat", "bird"]
        assert await play_round(here.plan, *puppets) == [whole, [], whole]
        _, [closed] = await here.ended()
        assert closed.arrived == ("a", "b", "c")


async def test_the_servers_own_test_data_are_a_word_too(tmp_path):
    """A run for which only devices of other classes are there does not begin."""
    (tmp_path / "own").mkdir()
    for split in ("train", "test"):
        (tmp_path / "own" / f"{split}.csv").write_text("v,w,label\n1,2,cat\n2,1,dog\n")
    model = 'name = "mlp"\noptions = { features = 2, hidden = 4, classes = 2 }'
    keys = {"data": 'source = "csv"\npath = "own"', "evaluation": "every = 1", "model": model}
    async with site(tmp_path, rounds=1, **keys) as here:
        await arrive(here, "a", ["cat", "dog"])
        await arrive(here, "b", ["bird", "cat"])
        with pytest.raises(ConfigError, match=naming(1, 2, "b", "bird, cat", "cat, dog")):
            await here.run


async def test_where_no_devices_label_is_read_it_is_all_the_same_what_they_are_called(tmp_path, caplog):
    """They were left out of runs for which they have no labels; or their labels were said to be taken as they are."""
    caplog.set_level(logging.INFO)
    keys = {
        "algorithm": 'name = "supervised_only"\noptions = { supervised_steps = 1, hidden = 4, projections = 2 }',
        "model": 'name = "cnn"\noptions = { side = 8, width = 2, hidden = 4 }',
        "data": 'source = "digits"\nlabels = "none"',
        "server_data": 'source = "digits"\ndrawn = { per_class = 1 }',
        "cohort": "min_devices = 3",
    }
    async with site(tmp_path, rounds=1, **keys) as here:
        told = {"a": ["cat", "dog"], "b": ["bird"], "c": None}
        puppets = [await arrive(here, name, classes) for name, classes in told.items()]
        tasks = [await puppet.task() for puppet in puppets]
        for puppet, task in zip(puppets, tasks, strict=True):
            assert (await puppet.answer(task, {})).verdict == "accepted"
        assert [one.arrived for one in (await here.ended())[1]] == [("a", "b", "c")]
        assert not [one for one in here.store.records() if isinstance(one, Noted)]
    assert "classes" not in caplog.text
