"""The ranks of a pipeline compare what they are about to do, so that a difference is an error and no hang."""
from typing import Dict, List, Sequence


def check_agreement(facts: Sequence[Dict[str, object]], ranks: Sequence[int], when: str) -> None:
    """ValueError, the same on every rank, if the ranks' facts differ: a table of who has what.

    ``facts`` has one dict for each rank of the pipeline (``ranks``: their global numbers).
    """
    different = [key for key in facts[0] if any(other.get(key) != facts[0][key] for other in facts)]
    if different:
        rows = [_row(key, [other.get(key) for other in facts], ranks) for key in different]
        raise ValueError(f"the ranks of the pipeline disagree {when}:\n" + "\n".join(rows))


def _row(key: str, values: List[object], ranks: Sequence[int]) -> str:
    return f"  {key}: " + ", ".join(f"rank {rank}: {value}" for rank, value in zip(ranks, values))
