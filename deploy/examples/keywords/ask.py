"""Ask a board for the word in a recording: `python ask.py data/board-1/stop/board-1-000.wav`."""

import json
import sys
from urllib.request import Request, urlopen

import numpy as np
import soundfile

from shared.data.sources.mel import log_mel
from shared.data.spec import Mel

URL = "http://127.0.0.1:18471/v2/models/keywords"


def ask(path: str = "", body: object = None) -> dict:
    """Return the answer of the board's model server."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(URL + path, data), timeout=10) as answer:
        return json.load(answer)


about = ask()
prepare = about["parameters"]["preprocessing"]
samples, _ = soundfile.read(sys.argv[1], dtype="float32")
features = (log_mel(samples[None], Mel()) - prepare["mean"][0]) / prepare["std"][0]
tensor = {**about["inputs"][0], "shape": [1, *about["inputs"][0]["shape"][1:]], "data": features.ravel().tolist()}
[output] = ask("/infer", {"inputs": [tensor]})["outputs"]
sys.stdout.write(about["parameters"]["classes"][int(np.argmax(output["data"]))] + "\n")
