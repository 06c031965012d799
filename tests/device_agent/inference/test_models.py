"""What is served: which version answers, how it does, and that two of a model are the most."""

from __future__ import annotations

import numpy as np
import pytest

from device_agent.inference.messages import compute_percentiles
from device_agent.inference.models import ServedModels
from device_agent.inference.release_folder import read_folder
from device_agent.inference.session import OpenModel, open_model
from shared.errors import ServingRefused
from tests.naming import naming


@pytest.fixture
def opened(made, settings):
    def model(key: str) -> OpenModel:
        files = read_folder(made[key])
        return open_model(files.manifest, files.parts, settings)

    return model


def test_a_request_is_answered_by_the_version_that_it_began_with(opened):
    """A switch changes who answers the next one; the old version computes on for those who hold it."""
    models = ServedModels()
    models.add(opened("tiny-1"))
    assert models.find("tiny") is None  # beside, and not yet in its place
    models.switch("tiny", 1)
    held = models.find("tiny")
    models.add(opened("tiny-2"))
    inputs = np.ones((1, *held.model.input.shape[1:]), np.float32)
    before = held.run(inputs)
    models.switch("tiny", 2)
    models.unload("tiny", 1)
    assert (held.run(inputs) == before).all()
    assert (models.find("tiny").run(inputs) != before).any()
    assert (models.versions("tiny"), models.names()) == ([2], ["tiny"])
    assert models.find("tiny", 1) is None


def test_a_third_version_is_refused_and_one_that_is_not_loaded_cannot_answer(opened):
    models = ServedModels()
    models.add(opened("tiny-1"))
    models.add(opened("tiny-2"))
    models.require_room("tiny", 2)
    with pytest.raises(ServingRefused, match="'tiny'"):
        models.require_room("tiny", 3)
    for ask in (models.switch, models.figures):
        with pytest.raises(ServingRefused, match=naming(3, "'tiny'")):
            ask("tiny", 3)
    models.unload("tiny", 3)  # is no fault


def test_outputs_that_are_no_numbers_count_against_the_model_unless_the_input_was_none(opened):
    models = ServedModels()
    models.add(opened("tiny-1"))
    models.switch("tiny", 1)
    served = models.find("tiny")
    shape = (1, *served.model.input.shape[1:])
    served.run(np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match="NaN"):
        served.run(np.full(shape, np.nan, np.float32))
    largest = np.full(shape, np.finfo(np.float32).max, np.float32)
    with pytest.raises(ServingRefused, match="NaN"):
        served.run(largest)
    with pytest.raises(ServingRefused, match="ONNXRuntimeError"):
        served.run(np.zeros((1, 1, 1, 1, 1), np.float32))
    told = models.figures("tiny", 1)
    assert (told.requests, told.errors, told.non_finite) == (4, 2, 1)
    assert 0 < told.p50_s <= told.p95_s <= told.p99_s


def test_percentiles_are_of_what_was_measured():
    hundred = [float(one) for one in range(100, 0, -1)]
    assert compute_percentiles(hundred, (0.5, 0.95, 0.99, 1.0)) == [50.0, 95.0, 99.0, 100.0]
    assert compute_percentiles([3.0], (0.5, 0.99)) == [3.0, 3.0]
    assert compute_percentiles([], (0.5,)) == [0.0]
