"""Ask a board for a forecast of fine dust: `python ask.py data/board-1.csv`."""

import csv
import json
import sys
from pathlib import Path
from urllib.request import Request, urlopen

URL = "http://127.0.0.1:18471/v2/models/air"
HOURS = 24


def ask(path: str = "", body: object = None) -> dict:
    """Return the answer of the board's model server."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(URL + path, data), timeout=10) as answer:
        return json.load(answer)


about = ask()
prepare = about["parameters"]["preprocessing"]
with Path(sys.argv[1]).open(newline="") as file:
    rows = list(csv.DictReader(file))[-HOURS:]
columns = zip(prepare["features"], prepare["mean"], prepare["std"], strict=True)
values = [(float(row[name]) - mean) / std for name, mean, std in columns for row in rows]
tensor = {**about["inputs"][0], "shape": [1, len(prepare["features"]), HOURS], "data": values}
forecast = ask("/infer", {"inputs": [tensor]})["outputs"][0]["data"]
sys.stdout.write("dust in the next hours: " + ", ".join(f"{dust:.1f}" for dust in forecast) + "\n")
