"""What `device-agent setup` brought is tried at once: a library that does not load is told with its remedy."""

from __future__ import annotations

from functools import partial

import pytest

from device_agent.commands import setup
from device_agent.probes import runtime
from device_agent.profile.load import load_for_board
from tests.device_agent.commands.test_doctor import FINE
from tests.machine import grow


@pytest.fixture
def profile(tmp_path):
    return load_for_board(tmp_path, "generic-x86")


def test_what_computes_is_said_with_where(profile, capsys):
    if not all(map(runtime.find_version, runtime.PACKAGES)):
        pytest.skip("torch or ONNX Runtime is not installed")
    assert setup.try_out("train", profile) == 0
    torch, onnxruntime = capsys.readouterr().out.splitlines()
    assert torch.startswith(f"torch: {runtime.find_version('torch')} ")
    assert ("CPU" in torch, "Python 3." in torch) == (True, True)
    assert onnxruntime.startswith(f"onnxruntime: {runtime.find_version('onnxruntime')} ")


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("libcudss.so.0: cannot open shared object file", "cuDSS"),
        ("libcusparseLt.so.0: cannot open shared object file", "libcusparselt0"),
        ("libopenblas.so.0: cannot open shared object file", "sudo apt install libopenblas0"),
        ("libcudnn.so.9: cannot open shared object file", "libcudnn9-cuda-12"),
        ("libcurand.so.10: cannot open shared object file", "sudo apt install nvidia-jetpack"),
    ],
)
def test_a_library_of_the_system_that_is_missing_is_named_with_its_package(
    tmp_path, monkeypatch, profile, capsys, said, remedy
):
    """NVIDIA's builds for JetPack load CUDA of the system, of which images have more or less."""
    grow(tmp_path, {"torch/__init__.py": f"raise ImportError({said!r})", "onnxruntime/__init__.py": ""})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert setup.try_out("train", profile) == setup.EXIT_UNUSABLE
    assert remedy in capsys.readouterr().out.splitlines()[0]


def test_a_board_that_trains_may_do_without_onnx_runtime(tmp_path, monkeypatch, profile, capsys):
    """It is told all the same; a board that serves needs it."""
    grow(tmp_path, {"onnxruntime/__init__.py": "raise ImportError('no such luck')"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert setup.try_out("infer", profile) == setup.EXIT_UNUSABLE
    monkeypatch.setattr(setup, "smoke_test", partial(tried_but_for_torch, setup.smoke_test))
    assert setup.try_out("train", profile) == 0
    assert capsys.readouterr().out.count("no such luck") == 2


def tried_but_for_torch(smoke_test, library, **more):
    """Try a library; torch, which is shown above, is taken as usable."""
    if library == "torch":
        return runtime.Verdict(library="torch", state="usable", version="2.13.0")
    return smoke_test(library, **more)


def test_a_gpu_that_the_driver_does_not_show_is_told(tmp_path, monkeypatch, capsys):
    """It trains on the CPU then, which nobody with a Jetson expects."""
    code = FINE["torch/__init__.py"].replace("N(cuda=None)", 'N(cuda="12.6")')
    grow(tmp_path, {"torch/__init__.py": code})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setitem(setup.LIBRARIES, "train", ("torch",))
    assert setup.try_out("train", load_for_board(tmp_path, "jetson-orin-nano")) == 0
    told = capsys.readouterr().out
    assert "CPU" in told
    assert "CUDA 12.6" in told
    assert "/dev/nvhost-gpu" in told
