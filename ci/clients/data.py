"""Random data for a tiny language model, and batches of it."""

import numpy as np

from sizes import LENGTH, SEED, SIZES


def samples(count, ragged, seed=SEED):
    """A list of ``count`` samples of random tokens; ``ragged``: each has a length of its own."""
    random = np.random.RandomState(seed)
    result = []
    for _ in range(count):
        length = random.randint(LENGTH // 2, LENGTH + 1) if ragged else LENGTH
        tokens = random.randint(1, SIZES["vocab_size"], length + 1)
        result.append({"input_ids": tokens[:-1], "labels": tokens[1:]})
    return result


def collate(samples):
    """One batch of samples, the shorter ones filled up at their ends with tokens whose loss does not count."""
    length = max(len(sample["labels"]) for sample in samples)
    pad = lambda values, filler: np.pad(values, (0, length - len(values)), constant_values=filler)
    return {
        "input_ids": np.stack([pad(sample["input_ids"], 0) for sample in samples]),
        "labels": np.stack([pad(sample["labels"], -100) for sample in samples]),
    }
