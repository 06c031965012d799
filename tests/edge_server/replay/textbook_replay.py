"""Textbook FedAvg in virtual time: t = C / f, E = kappa C f^2 + p t, and bits are the integral of a rate.

For parameters of one frame, updates of 48 KiB at most, and deadlines that are missed by far.
"""

from types import SimpleNamespace

HEADER, SMALL, PAUSE_S, QUICK_S = 36, 16 * 1024, 1.0, 0.625


class Device(SimpleNamespace):
    """Figures of one device, among them its rate: (way, second, round) -> bit/s, and until when."""

    def send(self, way: str, at: float, size: int) -> float:
        """Return when bytes arrive that leave at a second, behind those that left before them."""
        t, bits, number = max(at, self.free[way]), 8 * size, self.number if at >= self.since else self.before
        while not (found := self.rate(way, t, number))[0] or bits > found[0] * (found[1] - t):
            bits, t = bits - found[0] * (found[1] - t), found[1]
        self.free[way] = t + bits / found[0]
        return self.free[way] + self.delay_s

    def upload(self, offered: float, words) -> tuple[float, float, int]:
        """Return when an update is asked for and is there, and its frames' bytes: a small one, then two at once."""
        begun, now, start, frame, count = None, offered, 0, SMALL, 0
        while start < words.up:
            stop = min(words.up, start + (2 * frame if start else frame))
            now = self.send("down", now, words.want(frame, start, stop))
            begun, parts = begun or now, [min(frame, stop - place) for place in range(start, stop, frame)]
            now, count = [self.send("up", now, HEADER + part) for part in parts][-1], count + len(parts)
            start, frame = stop, frame * (2 if now - offered < QUICK_S else 1)
        return begun, now, words.up + HEADER * count


def simulate(fleet: list[Device], chosen, rounds: int, deadline_s: float, words) -> list[tuple[float, dict]]:
    """Return every round's seconds, and the figures of each device whose update came; words are messages' bytes."""
    now, done, found = 0.0, [], []
    for number in range(1, rounds + 1):
        cohort = [one for one in fleet if one.name in chosen(number)]
        for one in cohort:
            one.since, one.before, one.number = now, one.number, number
        for one, _, heard, spent in done:  # then it rests, until it is chosen again
            size = words.report(one, number - 1, spent)
            one.reported_at = one.rests_at = one.send("up", max(heard, one.reported_at + PAUSE_S), size)
        for one in cohort:
            if now >= one.rests_at:
                one.free = {"up": 0.0, "down": 0.0}
                one.reported_at = one.send("up", now, words.birth(one))
            one.told = one.send("down", now, words.task(one, number))
        asked, done = [one.send("up", one.told, words.want(words.largest, 0, words.down)) for one in cohort], []
        for one in cohort:  # what all of them need goes out when the last of them has asked
            here = one.send("down", max(asked), HEADER + words.down)
            spent = one.task(number) | one.radio("down", here - one.told) | {"bytes_down": HEADER + words.down}
            one.rests_at, ready = float("inf"), here + spent["compute_s"]
            if ready < now + deadline_s:
                begun, end, carried = one.upload(one.send("up", ready, words.update(one, number, spent)), words)
                heard = one.send("down", end, words.ack(one, number))
                done.append((one, end, heard, spent | one.radio("up", heard - begun) | {"bytes_up": carried}))
        began, now = now, max(end for _, end, _, _ in done) if len(done) == len(cohort) else now + deadline_s
        found.append((now - began, {one.name: spent for one, _, _, spent in done}))
    return found
