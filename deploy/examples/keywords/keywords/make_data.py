"""Write spoken commands of three boards as WAV files, simulated: each word is a sequence of vowels with formants."""

import math
import sys
import wave
from array import array
from pathlib import Path
from random import Random

RATE_HZ, SECONDS = 16000, 1.0
VOWELS = {"a": (730, 1090), "e": (530, 1840), "i": (270, 2290), "o": (570, 840), "u": (300, 870)}
"""First and second formant in Hz; Peterson and Barney, 1952."""
WORDS = {"go": "o", "left": "ei", "right": "ai", "stop": "oa", "up": "ua"}
VOICES_HZ = {"board-1": 110.0, "board-2": 170.0, "board-3": 240.0}
"""Pitch of the voices around each board."""
COUNT = 40


def speak(vowels: str, pitch_hz: float, random: Random) -> array:
    """Return one second of 16-bit samples with a word somewhere in it."""
    samples = [random.gauss(0, 0.01) for _ in range(int(RATE_HZ * SECONDS))]
    length = int(RATE_HZ * random.uniform(0.16, 0.24))
    begin = random.randrange(int(RATE_HZ * SECONDS) - length * len(vowels))
    pitch, loudness = pitch_hz * random.uniform(0.9, 1.1), random.uniform(0.15, 0.4)
    for place, vowel in enumerate(vowels):
        first, second = (formant * random.uniform(0.94, 1.06) for formant in VOWELS[vowel])
        harmonics = [
            (
                k * pitch,
                math.exp(-(((k * pitch - first) / 120) ** 2)) + 0.5 * math.exp(-(((k * pitch - second) / 160) ** 2)),
            )
            for k in range(1, int(3000 / pitch))
        ]
        loud = [(hertz, share) for hertz, share in harmonics if share > 0.02]
        for step in range(length):
            envelope = loudness * math.sin(math.pi * step / length)
            tone = sum(share * math.sin(2 * math.pi * hertz * step / RATE_HZ) for hertz, share in loud)
            samples[begin + place * length + step] += envelope * tone
    return array("h", (int(32767 * max(-1.0, min(1.0, sample))) for sample in samples))


def write(path: Path, samples: array) -> None:
    """Write a WAV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes(samples.tobytes())


def main(folder: Path) -> None:
    """Write a folder of words for each board, and one of all boards for replays."""
    random = Random(1)
    for board, pitch_hz in VOICES_HZ.items():
        for word, vowels in WORDS.items():
            for number in range(COUNT):
                samples = speak(vowels, pitch_hz, random)
                for target in (folder / board / word, folder / "all" / word):
                    write(target / f"{board}-{number:03}.wav", samples)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
