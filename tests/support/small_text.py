"""Made-up novels, and the problem `bookwiki` in small."""

from dataclasses import replace

import torch
from small_runs import setup_of

from cubegrad.study.problems import bookwiki

TINY = {
    "vocabulary": 300,
    "length": 32,
    "layers": 1,
    "width": 16,
    "heads": 2,
    "dropout": 0.1,
    "updates": 6,
    "at_once": 3,
    "test_blocks": 20,
}
WORDS = ("the cat", "a dog", "Anna", "naïve 猫", "the house", "</s>", "<mask> <unk>", "no one")


def write_texts(folder, **files):
    """A file NAME.txt for each NAME=text or NAME=bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        raw = text.encode() if isinstance(text, str) else text
        (folder / f"{name}.txt").write_bytes(raw)
    return folder


def sentence(i):
    parts = (WORDS[i % 8], ("sees", "hears", "likes")[i % 3], WORDS[i // 8 % 8], str(i % 17))
    return f"Then {' '.join(parts)}."


def novels(documents=40, sentences=30):
    """One text with a line for each sentence; no two neighbouring sentences are the same."""
    return "".join(
        f"<|n{d}|>\n" + "".join(f"{sentence(31 * d + s)}\n" for s in range(sentences))
        for d in range(documents)
    )


def small_problem(data, **options):
    """The problem with a net of a few thousand weights; writes its novels to `data`."""
    write_texts(data / "novels", all=novels())
    problem = bookwiki.problem()
    gpu = problem.presets["gpu"]
    preset = replace(gpu, epochs=3, batch=8, options={**gpu.options, **TINY, **options})
    return replace(problem, presets={"cpu": preset})


def task_of(small, seed=0, hold_out=False, **options):
    """The task of (problem, folder) with these options changed; its weights depend on the seed."""
    setup = setup_of(*small, seed=seed, hold_out=hold_out)
    preset = replace(setup.preset, options={**setup.preset.options, **options})
    torch.manual_seed(seed)
    return bookwiki.build(replace(setup, preset=preset))
