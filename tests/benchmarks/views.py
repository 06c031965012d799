"""Cost of two augmented views of a batch, beside training step and Pillow.

SemiSFL's devices make a weak and a strong view of every batch. Pictures are of CIFAR's size, the layers are AlexNet's
five convolutions. Pillow makes the strong view one picture after the other, as many operations, always the same ones.
"""

from __future__ import annotations

import torch
from measure import Figure
from PIL import Image, ImageEnhance, ImageOps
from savings import least_seconds

from shared.data.views.pair import make_views
from shared.models.alexnet import alexnet

BATCH, CUT, TURNS = 64, 5, 5


def run(*, quick: bool = False) -> list[Figure]:
    """Measure with one thread, in CPU seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _figures(1 if quick else TURNS)
    finally:
        torch.set_num_threads(threads)


def _figures(turns: int) -> list[Figure]:
    whole = alexnet()
    inputs = torch.rand(BATCH, *whole.example).contiguous(memory_format=torch.channels_last)
    below = whole.below(CUT).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stubs lack it

    def step() -> None:
        features = below(inputs)
        features.backward(torch.ones_like(features))

    views = least_seconds(lambda: make_views(inputs, ("weak", "strong"), 1), turns)
    bottom = least_seconds(step, turns)
    ours = least_seconds(lambda: make_views(inputs, ("strong",), 1), turns)
    return [
        Figure(f"weak and strong view of {BATCH} pictures", 1e3 * views, "CPU ms"),
        Figure("their share of the step below AlexNet's fifth cut", 100 * views / bottom, "%", "<= 15"),
        Figure("strong view alone", 1e3 * ours, "CPU ms"),
        Figure("strong view alone, by Pillow", 1e3 * least_seconds(lambda: _by_pillow(inputs), turns), "CPU ms"),
    ]


def _by_pillow(inputs: torch.Tensor) -> torch.Tensor:
    """Make as many operations with Pillow: a mirror, a crop, two of RandAugment, and a grey square."""
    pixels = (inputs * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    found = []
    for one in pixels:
        image = ImageOps.mirror(Image.fromarray(one)).transform((32, 32), Image.Transform.AFFINE, (1, 0, 2, 0, 1, 2))
        image = ImageEnhance.Contrast(ImageOps.equalize(image)).enhance(1.3)
        image.paste((127, 127, 127), (4, 4, 20, 20))
        found.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(32, 32, 3))
    return torch.stack(found).permute(0, 3, 1, 2).float() / 255
