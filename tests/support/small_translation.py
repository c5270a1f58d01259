"""Parallel text in small: numbers as words, which a small network learns to translate."""

import random
from dataclasses import replace

from cubegrad.study.problems import iwslt14

GERMAN = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
ENGLISH = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def sentences(count, seed):
    """German lines and English ones, of two to five numbers each."""
    source = random.Random(seed)
    digits = [source.choices(range(10), k=source.randint(2, 5)) for _ in range(count)]
    return tuple(
        [" ".join(words[digit] for digit in line) for line in digits] for words in (GERMAN, ENGLISH)
    )


def write_parts(folder, counts=(400, 40, 48)):
    """Files as fairseq's script names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (part, count) in enumerate(zip(("train", "valid", "test"), counts, strict=True)):
        for suffix, lines in zip((".de", ".en"), sentences(count, seed), strict=True):
            (folder / f"{part}{suffix}").write_text("".join(f"{line}\n" for line in lines))


def small_problem(**changed):
    problem = iwslt14.problem()
    options = {**problem.presets["cpu"].options, "folders": ["small"], "words": 0, "train": 0}
    options |= {"test": 0, "merges": 40, "width": 16, "steps": 15, "bleu": 20, **changed}
    preset = replace(problem.presets["cpu"], epochs=3, batch=128, options=options)
    return replace(problem, presets={"cpu": preset})
