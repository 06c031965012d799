"""Ask a board for the defects in an image: `python ask.py data/board-1/images/board-1-000.png`."""

import json
import sys
from urllib.request import Request, urlopen

import numpy as np
from PIL import Image

URL = "http://127.0.0.1:18471/v2/models/defects"
NAMES = ("sound", "scratch", "spot")


def ask(path: str = "", body: object = None) -> dict:
    """Return the answer of the board's model server."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(URL + path, data), timeout=10) as answer:
        return json.load(answer)


about = ask()
prepare = about["parameters"]["preprocessing"]
with Image.open(sys.argv[1]) as image:
    pixels = np.asarray(image.convert("L"), np.float32) / prepare["byte_scale"]
values = (pixels - prepare["mean"][0]) / prepare["std"][0]
tensor = {**about["inputs"][0], "shape": [1, 1, *pixels.shape], "data": values.ravel().tolist()}
[output] = ask("/infer", {"inputs": [tensor]})["outputs"]
classes = np.reshape(output["data"], output["shape"])[0].argmax(0)
shares = (f"{name} {np.mean(classes == number):.1%}" for number, name in enumerate(NAMES))
sys.stdout.write("pixels: " + ", ".join(shares) + "\n")
