"""Log-mel features of sound, with numpy alone.

S. S. Stevens, J. Volkmann, E. B. Newman, "A Scale for the Measurement of the Psychological Magnitude Pitch", 1937; the
scale is that of HTK, 2595 log10(1 + f / 700), with triangular filters of height 1. See S. Davis, P. Mermelstein,
"Comparison of parametric representations for monosyllabic word recognition", 1980,
https://doi.org/10.1109/TASSP.1980.1163420.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from shared.data.formats import Mel

FLOOR = 1e-6
"""Added to the energy of a band before the logarithm: the noise of 16 bits is above it."""


def fft_size(mel: Mel) -> int:
    """Return the length of the Fourier transform: the next power of two of a frame."""
    return 1 << max(0, mel.samples_per_frame - 1).bit_length()


def filterbank(mel: Mel) -> NDArray[np.float32]:
    """Return the weight of each frequency in each band, of shape (bands, fft_size // 2 + 1)."""
    low, high = (2595.0 * np.log10(1.0 + hertz / 700.0) for hertz in (mel.low_hz, mel.top_hz))
    edges = 700.0 * (10.0 ** (np.linspace(low, high, mel.bands + 2) / 2595.0) - 1.0)
    frequencies = np.arange(fft_size(mel) // 2 + 1) * (mel.rate_hz / fft_size(mel))
    lower, centre, upper = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - lower) / (centre - lower), (upper - frequencies) / (upper - centre)
    return np.maximum(0.0, np.minimum(rising, falling)).astype(np.float32)


def log_mel(samples: NDArray[np.float32], mel: Mel) -> NDArray[np.float32]:
    """Return the logarithm of each band's energy in Hann-windowed frames, of shape (N, 1, bands, frames).

    Args:
        samples: Of shape (N, samples), in [-1, 1].
    """
    frame = mel.samples_per_frame
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(frame) / frame)).astype(np.float32)
    frames = sliding_window_view(samples, frame, axis=1)[:, :: mel.samples_per_hop] * hann
    spectrum = np.fft.rfft(frames, n=fft_size(mel), axis=2)
    power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
    energies = power @ filterbank(mel).T
    return np.ascontiguousarray(np.log(energies + np.float32(FLOOR)).transpose(0, 2, 1))[:, None]


def resample(samples: NDArray[np.float32], rate_hz: int, target_hz: int) -> NDArray[np.float32]:
    """Resample to another rate by cutting or padding the spectrum, which keeps all frequencies below both limits.

    Args:
        samples: float32 of one channel, of shape (samples,).
    """
    count = round(len(samples) * target_hz / rate_hz)
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, n=count) * (count / len(samples))).astype(np.float32)
