"""Open Inference Protocol requests: JSON equals binary; invalid ones are refused."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from device_agent.inference.http.tensors import InferenceRequest, read_inference, write_inference
from shared.errors import WireError
from shared.protocol.inference.release import TensorSpec
from tests.naming import naming

GIVEN = TensorSpec(name="input", dtype="float32", shape=(-1, 2, 3))
WANTED = TensorSpec(name="output", dtype="float32", shape=(-1, 2))
NUMBERS = [[[1, 2.5, 3], [4, 5, 6]]]
FLAT = [1, 2.5, 3, 4, 5, 6]
MOST = 4


def body(tensor: dict | None = None, behind: bytes = b"", **keys: object) -> tuple[bytes, int | None]:
    told = {"name": "input", "shape": [1, 2, 3], "datatype": "FP32", **(tensor or {})}
    head = json.dumps({"inputs": [told], **keys}).encode()
    return head + behind, len(head) if behind else None


def read(*given: object, **keys: object) -> InferenceRequest:
    return read_inference(*body(*given, **keys), GIVEN, WANTED, MOST)


@pytest.mark.parametrize("data", [NUMBERS, FLAT])
def test_numbers_flat_or_nested_are_the_tensor(data):
    asked = read({"data": data}, id="mine")
    assert (asked.inputs == np.array(NUMBERS, np.float32)).all()
    assert (asked.inputs.dtype, asked.id, asked.is_binary) == (np.float32, "mine", False)


@pytest.mark.parametrize("blank", [0, 1, 2, 3])
def test_bytes_behind_the_json_are_the_tensor_wherever_they_lie(blank):
    """ONNX Runtime wants them aligned."""
    data = np.array(NUMBERS, "<f4").tobytes()
    asked = read({"parameters": {"binary_data_size": len(data)}}, data, id="x" * (blank + 1))
    assert (asked.inputs == np.array(NUMBERS, np.float32)).all()
    assert asked.inputs.flags.aligned
    assert asked.inputs.flags.c_contiguous


@pytest.mark.parametrize(
    ("keys", "binary"),
    [
        ({}, False),
        ({"parameters": {"binary_data_output": True}}, True),
        ({"outputs": [{"name": "output", "parameters": {"binary_data": True}}]}, True),
        ({"outputs": [{"name": "output"}], "parameters": {"binary_data_output": True}}, True),
        (
            {
                "outputs": [{"name": "output", "parameters": {"binary_data": False}}],
                "parameters": {"binary_data_output": True},
            },
            False,
        ),
    ],
)
def test_the_output_goes_back_as_it_is_asked_for(keys, binary):
    asked = read({"data": FLAT}, **keys)
    assert asked.is_binary == binary
    outputs = np.array([[0.5, -1.25]], np.float32)
    data, split = write_inference(outputs, WANTED, ("tiny", 3), asked)
    told = json.loads(data[:split] if split else data)
    assert (told["model_name"], told["model_version"], told["outputs"][0]["shape"]) == ("tiny", "3", [1, 2])
    assert (np.frombuffer(data[split:], "<f4") if split else np.array(told["outputs"][0]["data"])).tolist() == [
        0.5,
        -1.25,
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (({"shape": [2, 3], "data": FLAT},), r"'input'.*FP32.*\[n, 2, 3\].*1"),
        (({"shape": [1, 3, 2], "data": FLAT},), r"\[1, 3, 2\].*\[n, 2, 3\]"),
        (({"shape": [0, 2, 3], "data": []},), r"\[0, 2, 3\].*\[n, 2, 3\]"),
        (({"shape": [-1, 2, 3], "data": FLAT},), r"\[-1, 2, 3\].*\[n, 2, 3\]"),
        (({"shape": [5, 2, 3], "data": FLAT * 5},), r"\[5, 2, 3\].*\[n, 2, 3\].*4"),
        (({"shape": [10**30, 2, 3], "data": FLAT},), r"\[10+, 2, 3\].*\[n, 2, 3\]"),
        (({"datatype": "FP64", "data": FLAT},), "FP64.*'input'.*FP32"),
        (({"name": "other", "data": FLAT},), "'input'"),
        (({"data": FLAT[:-1]},), "'input'.*6"),
        (({},), "'input'.*6"),
        (({"data": ["1", "2", "3", "4", "5", "6"]},), "'input'.*6"),
        (({"data": [1, 2, 3, 4, 5, None]},), "'input'.*6"),
        (({"data": [True, False, True, False, True, False]},), "'input'.*6"),
        (({"data": [[1, 2], [3, 4, 5, 6]]},), "'input'.*inhomogeneous"),
        (({"data": [[1, 2, 3], [4, 5, 6]]},), "'input'.*6"),
        (({"data": FLAT}, b"more"), "4 bytes.*'binary_data_size'"),
        (({"parameters": {"binary_data_size": 24}}, b"x" * 23), "24 bytes.*23"),
        (({"parameters": {"binary_data_size": "24"}}, b"x" * 24), "24 bytes.*'24'"),
        (({"parameters": {"binary_data_size": "7" * 1000}}, b"x" * 24), "24 bytes.*'7{19}(?!7)"),
        (({"shape": [1, 10**1000]}, b""), r"\[1, 10{1,80}(?!0)"),
        (({"parameters": {"binary_data_size": 8}}, b"x" * 8), "24 bytes.*8"),
        (({"parameters": {"shared_memory_region": "here"}, "data": FLAT},), "shared_memory_region"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_is_expected(given, words):
    with pytest.raises(WireError, match=words):
        read(*given)


def test_outputs_that_there_are_not_are_refused():
    with pytest.raises(WireError, match=naming("'other'", "'output'")):
        read({"data": FLAT}, outputs=[{"name": "other"}])
    with pytest.raises(WireError, match="classification"):
        read({"data": FLAT}, outputs=[{"name": "output", "parameters": {"classification": 2}}])


@pytest.mark.parametrize(
    ("data", "split"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'{"inputs": {}}', None),
        (b'{"inputs": [1]}', None),
        (b"\xff\xfe", None),
        (b'{"inputs": [], "parameters": {"a": ' + b"[" * 100_000, None),
        (b"{}", 3),
        (b"{}", 0),
    ],
)
def test_what_is_no_request_is_told(data, split):
    with pytest.raises(WireError):
        read_inference(data, split, GIVEN, WANTED, MOST)


def test_damaged_requests_are_told_or_are_requests():
    """By seeds: bytes changed, cut, doubled and put in; nothing else is ever raised, and no shape but the model's."""
    draw = random.Random(1)
    data = np.array(NUMBERS, "<f4").tobytes()
    whole = [body({"data": NUMBERS}, id="x"), body({"parameters": {"binary_data_size": len(data)}}, data)]
    taken = 0
    for _ in range(4000):
        content, split = draw.choice(whole)
        spoiled = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(spoiled))
            end = place + draw.randint(0, 8)
            spoiled[place:end] = draw.choice(
                [b"", draw.randbytes(4), spoiled[place:end] * 2, b"9" * 20, b"[[[", b"null", b"1e999", b'"']
            )
        try:
            asked = read_inference(bytes(spoiled), split, GIVEN, WANTED, MOST)
        except WireError:
            continue
        taken += 1
        assert (asked.inputs.shape[1:], asked.inputs.dtype) == ((2, 3), np.float32)
    assert taken > 0


def test_whole_numbers_are_asked_for_where_the_model_takes_them():
    spec = TensorSpec(name="input", dtype="int64", shape=(-1, 2))
    tensor = {"shape": [1, 2], "datatype": "INT64"}
    asked = read_inference(*body(tensor | {"data": [3, 4]}), spec, WANTED, MOST)
    assert (asked.inputs.dtype, asked.inputs.tolist()) == (np.int64, [[3, 4]])
    with pytest.raises(WireError, match="'input'"):
        read_inference(*body(tensor | {"data": [3, 4.5]}), spec, WANTED, MOST)


def test_json_that_came_before_says_the_same_of_other_bytes_and_nothing_to_another_model():
    """It is not read again; its tensor is."""
    told = {"parameters": {"binary_data_size": 24}}
    wants = {"binary_data_output": True}
    for shift in (0, 1, 2):
        numbers = np.array(NUMBERS, "<f4") + shift
        asked = read(told, numbers.tobytes(), parameters=wants)
        assert (asked.inputs == numbers).all()
        data, split = write_inference(asked.inputs[0], WANTED, ("tiny", shift), asked)
        assert json.loads(data[:split])["model_version"] == str(shift)
        assert (np.frombuffer(data[split:], "<f4").reshape(2, 3) == numbers[0]).all()
    request = body(told, bytes(24), parameters=wants)
    read_inference(*request, GIVEN, WANTED, MOST)
    for given, wanted, most in (
        (TensorSpec(name="input", dtype="float32", shape=(-1, 3, 2)), WANTED, MOST),
        (TensorSpec(name="other", dtype="float32", shape=(-1, 2, 3)), WANTED, MOST),
        (TensorSpec(name="input", dtype="int32", shape=(-1, 2, 3)), WANTED, MOST),
        (GIVEN, WANTED, 0),
    ):
        with pytest.raises(WireError):
            read_inference(*request, given, wanted, most)
    with pytest.raises(WireError, match=naming("24 bytes", 23)):
        read(told, bytes(23), parameters=wants)
