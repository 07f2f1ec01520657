"""What has to hold after each kind of drill."""

from drill import LIMIT, MARGIN


def others(result, at):
    return [rank for rank in range(len(result.codes)) if rank != at]


def ended_with_errors_naming(result, at, *words, limit=LIMIT):
    """All other ranks have ended with an error that has one of the words, in time."""
    assert set(others(result, at)) <= set(result.errors), result.outputs
    for rank in others(result, at):
        assert result.codes[rank] == 1, (rank, result.codes, result.outputs[rank])
        assert any(word in result.errors[rank] for word in words), (rank, result.errors[rank])
    assert result.slowest < limit + MARGIN


def lost(result, at):
    """Rank ``at`` has ended without a word: the errors name it."""
    closed = f"(rank {at}): the other process has ended"
    ended_with_errors_naming(result, at, closed, f"rank {at}, which keeps the job's store, has ended")
    assert result.slowest < 10


def failed_and_recovered(result, at, text):
    """The error is known on all ranks, and what came after it was as in one process."""
    assert set(result.errors) == set(range(len(result.codes)))
    for rank, error in result.errors.items():
        assert text in error and (rank == at or f"rank {at} of the pipeline failed" in error), (rank, error)
    assert result.slowest < 10
    for rank, output in enumerate(result.outputs):
        assert "RECOVERED" in output and "DONE" in output and result.codes[rank] == 0, output


def survived(result):
    for rank, output in enumerate(result.outputs):
        assert "NO ERROR" in output and "DONE" in output and result.codes[rank] == 0, (rank, output)
