"""Write images of brushed metal with scratches and spots, and a mask of each, for three production lines."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

LINES = {"board-1": 0.45, "board-2": 0.55, "board-3": 0.65}
"""Brightness of each line's camera."""
COUNT, SIDE = 60, 32


def photograph(brightness: float, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a grey image and its mask, both uint8 of shape (SIDE, SIDE); classes: 0 sound, 1 scratch, 2 spot."""
    stripes = random.normal(0, 0.05, (SIDE, 1)) + random.normal(0, 0.02, (SIDE, SIDE))
    image, mask = brightness + stripes, np.zeros((SIDE, SIDE), np.uint8)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    for _ in range(random.integers(1, 3)):
        angle, offset = random.uniform(0.3, 2.8), random.uniform(8, 24)
        distance = abs((columns - offset) * np.sin(angle) - (rows - SIDE / 2) * np.cos(angle))
        scratch = distance < random.uniform(0.8, 1.6)
        image, mask = np.where(scratch, image + 0.3, image), np.where(scratch, 1, mask)
    if random.random() < 0.7:
        centre = random.uniform(6, SIDE - 6, 2)
        spot = np.hypot(rows - centre[0], columns - centre[1]) < random.uniform(2, 5)
        image, mask = np.where(spot, image - 0.3, image), np.where(spot, 2, mask)
    return (np.clip(image, 0, 1) * 255).astype(np.uint8), mask.astype(np.uint8)


def main(folder: Path) -> None:
    """Write images and masks of each line, and of all lines for replays."""
    random = np.random.default_rng(1)
    for line, brightness in LINES.items():
        for number in range(COUNT):
            image, mask = photograph(brightness, random)
            for target in (folder / line, folder / "all"):
                for kind, pixels in (("images", image), ("masks", mask)):
                    (target / kind).mkdir(parents=True, exist_ok=True)
                    Image.fromarray(pixels).save(target / kind / f"{line}-{number:03}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
