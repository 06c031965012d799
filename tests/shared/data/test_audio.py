"""Sound files by class: log-mel features by the textbook, other sample rates, damage."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest

from shared.data.classes import class_names
from shared.data.formats import Mel
from shared.data.inputs import read_preparation
from shared.data.load import load
from shared.data.sources.mel import FLOOR, fft_size, filterbank, log_mel, resample
from shared.data.spec import Data
from shared.runtime.extras import install_command
from tests.naming import names_all

soundfile = pytest.importorskip("soundfile", reason="soundfile is absent")
RATE = 16000


def tone(hertz, seconds=1.0, rate=RATE):
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def write(path, samples, rate=RATE, **keys):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate, **keys)


def test_features_are_those_of_the_textbook():
    """Against loops over frames, bands and frequencies, with a direct Fourier sum."""
    mel = Mel(rate_hz=2000, seconds=0.1, bands=6, frame_s=0.02, hop_s=0.01, low_hz=50.0)
    samples = np.random.default_rng(0).uniform(-1, 1, (2, mel.samples)).astype(np.float32)
    features = log_mel(samples, mel)
    size, frame = 64, 40
    edges = [700 * (10 ** (m / 2595) - 1) for m in np.linspace(*(2595 * np.log10(1 + f / 700) for f in (50, 1000)), 8)]
    for number, sound in enumerate(samples.astype(np.float64)):
        for place in range(mel.frames):
            part = sound[place * 20 : place * 20 + frame]
            window = [0.5 - 0.5 * np.cos(2 * np.pi * n / frame) for n in range(frame)]
            power = [
                abs(sum(part[n] * window[n] * np.exp(-2j * np.pi * k * n / size) for n in range(frame))) ** 2
                for k in range(size // 2 + 1)
            ]
            for band in range(6):
                low, centre, high = edges[band : band + 3]
                energy = 0.0
                for k, value in enumerate(power):
                    hertz = k * 2000 / size
                    if low < hertz < high:
                        weight = (hertz - low) / (centre - low) if hertz <= centre else (high - hertz) / (high - centre)
                        energy += weight * value
                assert features[number, 0, band, place] == pytest.approx(np.log(energy + FLOOR), rel=1e-4, abs=1e-4)
    assert features.shape == (2, 1, mel.bands, mel.frames) == (2, 1, 6, 9)


@pytest.mark.parametrize("band", [8, 20, 39])
def test_a_tone_is_loudest_in_the_band_around_it(band):
    mel = Mel()
    centre = filterbank(mel)[band].argmax() * RATE / fft_size(mel)
    assert log_mel(tone(centre).astype(np.float32)[None], mel)[0, 0].mean(axis=1).argmax() == band


@pytest.mark.parametrize("rate", [8000, 44100])
def test_resampling_keeps_a_tone(rate):
    """Of a whole number of periods, to float32."""
    np.testing.assert_allclose(resample(tone(1000, rate=rate).astype(np.float32), rate, RATE), tone(1000), atol=2e-6)


@pytest.mark.parametrize("kind", [("wav", "PCM_16"), ("wav", "PCM_24"), ("flac", "PCM_16"), ("ogg", "VORBIS")])
def test_files_by_class(tmp_path, kind):
    """Short ones are padded, long ones cut, two channels averaged; classes by folder."""
    suffix, subtype = kind
    write(tmp_path / "up" / f"1.{suffix}", tone(2000, 0.5), subtype=subtype)
    write(tmp_path / "down" / f"2.{suffix}", np.stack([tone(500, 1.5), tone(500, 1.5)], axis=1), subtype=subtype)
    spec = Data(source="audio", path=str(tmp_path))
    examples = load(spec)
    assert examples.labels.tolist() == [0, 1]
    assert class_names(spec) == examples.classes == ("down", "up")
    assert read_preparation(spec).shape == tuple(examples.inputs.shape[1:]) == (1, 40, 98)
    expected = log_mel(tone(500).astype(np.float32)[None], Mel())
    assert np.abs(examples.inputs[0].numpy() - expected[0])[0, :30].max() < (3 if suffix == "ogg" else 0.5)
    assert examples.inputs[1, 0, :, 60:].max() == pytest.approx(np.log(FLOOR), abs=1e-3 if suffix != "ogg" else 3)


def test_other_rates_are_refused_or_resampled(tmp_path, refused):
    path = tmp_path / "a" / "1.wav"
    write(path, tone(500, rate=44100), 44100)
    assert names_all(refused(source="audio", path=str(tmp_path)), path, "44100 Hz", RATE, "mel.resample")
    resampled = load(Data(source="audio", path=str(tmp_path), mel=Mel(resample=True)))
    write(path, tone(500))
    same = load(Data(source="audio", path=str(tmp_path)))
    is_loud = same.inputs > 0
    assert is_loud.sum() > 98
    assert (resampled.inputs - same.inputs).abs()[is_loud].max() < 0.01


def test_damaged_and_empty_files(tmp_path, refused):
    path = tmp_path / "a" / "1.wav"
    path.parent.mkdir()
    write(path, tone(500))
    whole = path.read_bytes()
    rate = whole[:24] + struct.pack("<I", (1 << 31) - 1) + whole[28:]
    for content in (b"", b"RIFF" + bytes(40), whole[: len(whole) // 2], whole[:-2]):
        path.write_bytes(content)
        assert names_all(refused(source="audio", path=str(tmp_path)), path, "damaged")
    path.write_bytes(rate)
    assert names_all(refused(source="audio", path=str(tmp_path), mel=Mel(resample=True)), path, "no sound")
    write(path, np.zeros(0))
    assert names_all(refused(source="audio", path=str(tmp_path)), path, "no sound")
    for value in (np.nan, -np.inf, 1e30):
        soundfile.write(path, np.array([0.1, value], dtype=np.float32), RATE, subtype="FLOAT")
        assert names_all(refused(source="audio", path=str(tmp_path)), path, "NaN", "infinite")
    path.rename(path.with_suffix(".mp3"))
    assert names_all(refused(source="audio", path=str(tmp_path)), tmp_path, ".mp3", ".flac, .ogg, .wav")


@pytest.mark.parametrize("length", [0, 0x7FFFFFFF, 0xFFFFFFFF])
def test_sound_written_to_a_pipe_has_no_length(tmp_path, length):
    path = tmp_path / "a" / "1.wav"
    write(path, tone(500))
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + struct.pack("<I", length) + whole[8:40] + b"\xff" * 4 + whole[44:])
    assert len(load(Data(source="audio", path=str(tmp_path)))) == 1


def test_files_that_are_being_written_are_left_for_later(tmp_path):
    write(tmp_path / "a" / "1.wav", tone(500))
    (tmp_path / "a" / "2.wav").write_bytes(b"RIFF")
    assert len(load(Data(source="audio", path=str(tmp_path), growing=True))) == 1


def test_without_soundfile(tmp_path, monkeypatch, refused):
    write(tmp_path / "a" / "1.wav", tone(500))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    assert install_command("audio") in refused(source="audio", path=str(tmp_path))


@pytest.mark.parametrize(
    "keys", [{"rate_hz": 0}, {"bands": 0}, {"seconds": 0.01}, {"hop_s": 0.0}, {"high_hz": 9000.0}, {"low_hz": 8000.0}]
)
def test_features_that_cannot_be(keys):
    with pytest.raises(ValueError, match="mel"):
        Mel(**keys)
