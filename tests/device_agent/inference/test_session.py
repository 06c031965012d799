"""A release in ONNX Runtime: the numbers of PyTorch, and a clear word for each release that is none."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from device_agent.inference.release_folder import read_folder, read_folders
from device_agent.inference.session import choose_providers, list_auto_providers, open_fastest_session, open_model
from shared.errors import ConfigError, CorruptFile
from shared.protocol.inference.release import GRAPH, MANIFEST, PARAMETERS, PROBES, sha256_of
from tests.naming import names_all, naming


def opened(folder, settings):
    files = read_folder(folder)
    return open_model(files.manifest, files.parts, settings)


def told_anew(folder, name):
    """Write a spoiled part's digest into the manifest, as one who made a release of it would."""
    manifest = json.loads((folder / MANIFEST).read_text())
    data = (folder / name).read_bytes()
    part = manifest["parameters"] if name == PARAMETERS else manifest["graph"]["part"]
    part |= {"sha256": sha256_of(data), "size": len(data)}
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("key", ["tiny-1", "lenet"])
def test_it_computes_what_pytorch_does(key, made, settings):
    """On the probes that its release carries, within 1e-5 of the largest output."""
    model = opened(made[key], settings)
    probes = load_file(made[key] / PROBES)
    found = model.run(probes["inputs"])
    assert np.abs(found - probes["outputs"]).max() <= 1e-5 * np.abs(probes["outputs"]).max()
    assert (found.shape[0], model.provider) == (10, "CPUExecutionProvider")
    assert 0 < model.quick_s <= model.seconds


@pytest.mark.parametrize("name", [GRAPH, PARAMETERS])
@pytest.mark.parametrize("spoil", ["cut", "changed", "gone"])
def test_a_damaged_part_is_refused_by_its_digest(name, spoil, copied, settings):
    folder = copied("tiny-1")
    data = bytearray((folder / name).read_bytes())
    if spoil == "gone":
        (folder / name).unlink()
    else:
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data[:-1] if spoil == "cut" else data)
    with pytest.raises(CorruptFile, match=name):
        opened(folder, settings)


def test_parameters_that_are_no_numbers_are_refused_by_name(copied, settings):
    """ONNX Runtime would take them."""
    folder = copied("tiny-1")
    tensors = load_file(folder / PARAMETERS)
    spoiled = min(tensors)
    tensors[spoiled] = tensors[spoiled].copy()
    tensors[spoiled].flat[0] = np.nan
    save_file(tensors, folder / PARAMETERS)
    told_anew(folder, PARAMETERS)
    with pytest.raises(CorruptFile, match=naming(repr(spoiled), "NaN")):
        opened(folder, settings)


def test_parameters_of_another_network_are_refused_by_name(copied, made, settings):
    folder = copied("tiny-1")
    (folder / PARAMETERS).write_bytes((made["lenet"] / PARAMETERS).read_bytes())
    told_anew(folder, PARAMETERS)
    with pytest.raises(CorruptFile, match=r"tiny/1.*'.+'"):
        opened(folder, settings)


def test_a_graph_that_is_not_the_manifest_s_is_refused(copied, made, settings):
    """Its tensors are checked, so that no request is judged by another shape than the graph's."""
    folder = copied("tiny-1")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["graph"]["input"]["shape"] = [-1, 7]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CorruptFile, match=naming("'input'", "[-1, 7]")):
        opened(folder, settings)


def test_a_graph_that_onnx_runtime_does_not_read_is_refused_with_its_words(copied, settings):
    """Such as of an opset that it does not know yet."""
    onnx = pytest.importorskip("onnx")
    folder = copied("tiny-1")
    proto = onnx.load_model_from_string((folder / GRAPH).read_bytes())
    proto.opset_import[0].version = 99
    (folder / GRAPH).write_bytes(proto.SerializeToString())
    told_anew(folder, GRAPH)
    with pytest.raises(ConfigError, match=naming("tiny/1", 99)):
        opened(folder, settings)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda _: b"no graph", "tiny/1"),
        (lambda graph: graph[:4] + b"ORTM" + graph[8:], "ONNX Runtime"),
        (lambda graph: graph + outside("secret"), "'secret'"),
    ],
    ids=["no graph", "another format", "a file beside it"],
)
def test_a_graph_that_cannot_be_looked_through_or_has_a_file_read_is_refused(copied, settings, spoil, problem):
    folder = copied("tiny-1")
    (folder / GRAPH).write_bytes(spoil((folder / GRAPH).read_bytes()))
    told_anew(folder, GRAPH)
    with pytest.raises(CorruptFile, match=problem):
        opened(folder, settings)


def outside(name):
    """Return what adds a tensor that lies in a file to a serialized model: messages of one field are merged."""
    onnx = pytest.importorskip("onnx")
    more = onnx.ModelProto()
    more.graph.initializer.add(name=name, dims=[1], data_type=1, data_location=1)
    return more.SerializeToString()


def test_a_release_of_a_newer_format_is_refused(copied):
    folder = copied("tiny-1")
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(ConfigError, match=naming(MANIFEST, 99)):
        read_folder(folder)


def test_folders_that_hold_no_release_or_the_same_model_are_refused(made, copied, tmp_path):
    with pytest.raises(ConfigError, match=naming("serve.releases", tmp_path / "nothing")):
        read_folders([str(tmp_path / "nothing")])
    with pytest.raises(ConfigError, match=naming("serve.releases", "'tiny'")):
        read_folders([str(made["tiny-1"]), str(made["tiny-2"])])
    folder = copied("tiny-1")
    (folder / MANIFEST).write_text("{")
    with pytest.raises(ConfigError, match=naming("serve.releases", folder)):
        read_folders([str(folder)])


def test_a_provider_that_is_not_there_is_named_and_the_cpu_computes(made, settings, caplog):
    """Never silently."""
    import msgspec  # noqa: PLC0415

    cpu = ["CPUExecutionProvider"]
    assert choose_providers("cpu", cpu) == (cpu, "")
    both = ["CUDAExecutionProvider", *cpu]
    assert choose_providers("cuda", ["Other", *both]) == (both, "")
    taken, lack = choose_providers("tensorrt", both)
    assert (taken, "TensorrtExecutionProvider" in lack) == (both, True)
    model = opened(made["tiny-1"], msgspec.structs.replace(settings, provider="tensorrt"))
    if model.provider == cpu[0]:
        assert names_all(caplog.text, "TensorrtExecutionProvider", "CPUExecutionProvider", "tiny/1")


def test_auto_takes_the_cpu_where_there_is_nothing_else(made, settings, caplog):
    import msgspec  # noqa: PLC0415

    assert list_auto_providers(["CPUExecutionProvider"]) == [("CPUExecutionProvider",)]
    model = opened(made["tiny-1"], msgspec.structs.replace(settings, provider="auto"))
    assert model.provider == "CPUExecutionProvider"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


class Session:
    """What is opened, of a provider."""

    def __init__(self, provider: str) -> None:
        self.provider = provider

    def get_providers(self) -> list[str]:
        return [self.provider]


GPU, BOTH = "CUDAExecutionProvider", [("CUDAExecutionProvider", "CPUExecutionProvider"), ("CPUExecutionProvider",)]


@pytest.mark.parametrize(("gpu_s", "cpu_s", "taken"), [(0.001, 0.002, GPU), (0.002, 0.001, "CPUExecutionProvider")])
def test_auto_takes_the_faster_of_gpu_and_cpu(gpu_s, cpu_s, taken):
    """A small network may take longer on a GPU: its times decide, for each model anew."""
    seconds = {GPU: gpu_s, "CPUExecutionProvider": cpu_s}
    assert list_auto_providers(["TensorrtExecutionProvider", GPU, "CPUExecutionProvider"]) == BOTH
    session, quick_s = open_fastest_session(lambda providers: (Session(providers[0]), seconds[providers[0]]), BOTH, "m")
    assert (session.provider, quick_s) == (taken, min(gpu_s, cpu_s))


def test_auto_goes_on_without_a_gpu_that_does_not_load(caplog):
    """ONNX Runtime opens the model on the CPU instead, or refuses its graph there; both are said."""

    def falls_back(providers):
        return Session("CPUExecutionProvider"), 0.001

    def refuses(providers):
        if providers[0] == GPU:
            raise ConfigError("no kernel")
        return Session(providers[0]), 0.001

    for open_with, words in ((falls_back, ""), (refuses, "no kernel")):
        caplog.clear()
        session, _ = open_fastest_session(open_with, BOTH, "m")
        assert session.provider == "CPUExecutionProvider"
        [told] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert names_all(told, "serve.provider", GPU, words)


def test_threads_that_wait_spin_only_where_it_was_chosen(made, settings):
    import msgspec  # noqa: PLC0415

    for spin, words in ((0, "0"), (50, "1")):
        model = opened(made["tiny-1"], msgspec.structs.replace(settings, threads=2, spin_us=spin))
        options = model.session.get_session_options()
        assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 1)
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == words
