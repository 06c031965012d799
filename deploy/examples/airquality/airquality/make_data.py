"""Write hourly measurements of three street sensors, simulated: dust from traffic, dispersed by warm air."""

import csv
import math
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

SENSORS = {"board-1": 1.0, "board-2": 2.0, "board-3": 3.5}
"""Traffic of each sensor's street."""
DAYS = 60
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
COLUMNS = ("time", "temperature", "humidity", "traffic", "dust")


def measure(traffic: float, random: Random) -> list[tuple[str, ...]]:
    """Return the rows of one sensor."""
    rows, dust = [], 12.0
    for hour in range(24 * DAYS):
        of_day = hour % 24
        temperature = 12 + 7 * math.sin((of_day - 9) / 24 * 2 * math.pi) + random.gauss(0, 0.8)
        humidity = 65 - 1.8 * (temperature - 12) + random.gauss(0, 4)
        vehicles = traffic * (0.1 + max(0.0, math.sin((of_day - 6) / 14 * math.pi))) + random.gauss(0, 0.05)
        dust = max(0.0, 0.82 * dust + 3.5 * vehicles - 0.08 * (temperature - 12) + random.gauss(0.6, 0.5))
        time = (BEGIN + timedelta(hours=hour)).isoformat()
        rows.append((time, f"{temperature:.2f}", f"{humidity:.2f}", f"{vehicles:.3f}", f"{dust:.2f}"))
    return rows


def main(folder: Path) -> None:
    """Write one file for each sensor, and one of all of them for replays."""
    folder.mkdir(parents=True, exist_ok=True)
    random = Random(1)
    with (folder / "all.csv").open("w", newline="") as file:
        together = csv.writer(file)
        together.writerow(("sensor", *COLUMNS))
        for name, traffic in SENSORS.items():
            rows = measure(traffic, random)
            with (folder / f"{name}.csv").open("w", newline="") as own_file:
                own = csv.writer(own_file)
                own.writerow(COLUMNS)
                own.writerows(rows)
            together.writerows((name, *row) for row in rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
