"""Windows of a time series and mel features of sound: nested tables of `[data]`."""

from __future__ import annotations

import math

import msgspec

MAX_WINDOW, MAX_HORIZON, MAX_BANDS, MAX_RATE_HZ, MAX_SECONDS = 1 << 20, 1 << 16, 1 << 10, 1 << 20, 3600.0
DAY_S = 86400.0


class Window(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Windows of consecutive rows of a table, one example each, of shape (features, length).

    Attributes:
        length: Rows of a window.
        horizon: Rows after the window whose targets are predicted, in order; 0 for the targets of its last row. Above 0
            the target columns are features too, unless `feature_columns` names others.
        stride: Rows from one window's start to the next one's.
        max_gap_s: Seconds between two rows above which no window spans them; absent for twice the median interval of
            the file. It needs `time_column`.
        block_s: Seconds of the blocks that `holdout_by = "hash"` holds out as a whole, so that windows of both sides do
            not overlap. It needs `time_column`.
    """

    length: int
    horizon: int = 0
    stride: int = 1
    max_gap_s: float | msgspec.UnsetType = msgspec.UNSET
    block_s: float = DAY_S

    def __post_init__(self) -> None:
        """Refuse windows without rows, or longer than any file."""
        if not 1 <= self.length <= MAX_WINDOW or not 0 <= self.horizon <= MAX_HORIZON:
            raise ValueError(f"window.length must be 1 to {MAX_WINDOW}, window.horizon 0 to {MAX_HORIZON}")
        if not 1 <= self.stride <= MAX_WINDOW:
            raise ValueError(f"window.stride must be 1 to {MAX_WINDOW}, not {self.stride}")
        if self.max_gap_s is not msgspec.UNSET and not 0 < self.max_gap_s < math.inf:
            raise ValueError(f"window.max_gap_s must be above 0 and finite, not {self.max_gap_s}")
        if not 0 < self.block_s < math.inf:
            raise ValueError(f"window.block_s must be above 0 and finite, not {self.block_s}")


class Mel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Log-mel features of sound files, of shape (1, bands, frames).

    Attributes:
        rate_hz: Sample rate of the network's input.
        resample: Whether files of other rates are resampled; otherwise they are refused.
        seconds: Length of an example: longer files are cut, shorter ones padded with silence at the end.
        bands: Number of mel bands.
        frame_s: Length of a frame in seconds.
        hop_s: Seconds from one frame's start to the next one's.
        low_hz: Lower edge of the lowest band.
        high_hz: Upper edge of the highest band; 0 for half of `rate_hz`.
    """

    rate_hz: int = 16000
    resample: bool = False
    seconds: float = 1.0
    bands: int = 40
    frame_s: float = 0.025
    hop_s: float = 0.01
    low_hz: float = 20.0
    high_hz: float = 0.0

    def __post_init__(self) -> None:
        """Refuse features that no sound has."""
        if not 1 <= self.rate_hz <= MAX_RATE_HZ or not 1 <= self.bands <= MAX_BANDS:
            raise ValueError(f"mel.rate_hz must be 1 to {MAX_RATE_HZ}, mel.bands 1 to {MAX_BANDS}")
        if not 0 < self.seconds <= MAX_SECONDS:
            raise ValueError(f"mel.seconds must be above 0 up to {MAX_SECONDS:g}, not {self.seconds}")
        if not 1 <= self.samples_per_frame <= self.samples or self.samples_per_hop < 1:
            raise ValueError("mel.frame_s and mel.hop_s must be a sample or more, frame_s at most mel.seconds")
        if not 0 <= self.low_hz < self.top_hz <= self.rate_hz / 2:
            raise ValueError("mel.low_hz must be below mel.high_hz, and that at most half of mel.rate_hz")

    @property
    def samples(self) -> int:
        """Samples of an example."""
        return round(self.seconds * self.rate_hz)

    @property
    def samples_per_frame(self) -> int:
        """Samples of a frame."""
        return round(self.frame_s * self.rate_hz)

    @property
    def samples_per_hop(self) -> int:
        """Samples from one frame's start to the next one's."""
        return round(self.hop_s * self.rate_hz)

    @property
    def frames(self) -> int:
        """Frames of an example."""
        return 1 + (self.samples - self.samples_per_frame) // self.samples_per_hop

    @property
    def top_hz(self) -> float:
        """Upper edge of the highest band."""
        return self.high_hz or self.rate_hz / 2
