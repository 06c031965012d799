"""CPU load for calibration: endless training in a separate process.

Each line on standard input sets the number of threads, 0 to pause; end of file ends the process. Prints `ready` once.
"""

from __future__ import annotations

import sys
import threading

from shared.protocol.messages import Spec
from shared.runtime.processes import loading

BATCH, SIDE, CLASSES = 32, 28, 10
MODEL = Spec(name="cnn")


class ThreadCountReader:
    """Reads the number of threads from standard input."""

    def __init__(self) -> None:
        self.count, self.ended = 0, False
        self.changed = threading.Event()

    def start(self) -> None:
        """Read in a background thread."""
        threading.Thread(target=self.run, name="threads", daemon=True).start()

    def run(self) -> None:
        """Read until end of file."""
        for line in sys.stdin:
            self.count = int(line)
            self.changed.set()
        self.ended = True
        self.changed.set()


def main() -> None:
    """Train with the requested number of threads until standard input closes."""
    with loading():
        import torch  # noqa: PLC0415 - nothing heavy where this module is only named

        from shared.models.build import build_initial  # noqa: PLC0415

    layers = build_initial(MODEL, seed=0).layers
    inputs, labels = torch.randn(BATCH, 1, SIDE, SIDE), torch.randint(CLASSES, (BATCH,))
    descent = torch.optim.SGD(layers.parameters(), lr=0.01)
    threads = ThreadCountReader()
    threads.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while not threads.ended:
        if threads.changed.is_set():
            threads.changed.clear()
            torch.set_num_threads(max(1, threads.count))
        if not threads.count:
            threads.changed.wait()
            continue
        descent.zero_grad()
        torch.nn.functional.cross_entropy(layers(inputs), labels).backward()
        descent.step()


if __name__ == "__main__":
    main()
