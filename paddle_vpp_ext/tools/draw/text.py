"""A timeline in characters: coloured by rich on a terminal, else plain.

Each rank is a line, each column a slice of time that shows what runs in its middle. A line
that is too long for the terminal is cut into up to MAX_BANDS pieces below each other; beyond
that time is squeezed until it fits, and the numbers go.
"""

import bisect
import math
import shutil
import string
import sys
from typing import NamedTuple, Optional, TextIO

from . import palette
from .timeline import Block, Timeline, by_rank, format_time, from_zero, num_chunks, short_duration, summary

MAX_BANDS = 4

# In plain text a forward is written in small letters, a backward in capitals; the letter is the chunk.
FILL = {"F": "-", "B": "=", "I": "~", "W": "+"}
IDLE = "."


class Segment(NamedTuple):
    """A run of columns that show one block, or nothing."""

    width: int
    block: Optional[Block]


class Scale(NamedTuple):
    """``per_unit``: columns in one unit of time; ``columns`` of the whole timeline, ``band`` of one band.

    ``squeezed``: there is no room for numbers.
    """

    per_unit: float
    columns: int
    band: int
    squeezed: bool

    @property
    def bands(self) -> int:
        """How many pieces lie below each other."""
        return math.ceil(self.columns / self.band)


def show(blocks: Timeline, headline: str = "", file: Optional[TextIO] = None) -> None:
    """Prints a timeline with makespan, idle share and peak: in colours if rich is there and ``file`` (stdout) is a terminal."""
    file = file or sys.stdout
    console = _console(file)
    if console:
        console.print(_coloured(blocks, headline, console.width), soft_wrap=True, highlight=False)
    else:
        print(plain(blocks, headline, shutil.get_terminal_size((100, 24)).columns), file=file)


def _console(file):
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=file)
    # With fewer than 256 colours the shades of the chunks would look alike: letters are better.
    return console if console.is_terminal and console.color_system in ("256", "truecolor") else None


def plain(blocks: Timeline, headline: str = "", width: int = 100) -> str:
    """The timeline in ASCII, at most ``width`` columns wide."""
    return "".join(text for text, _ in _pieces(blocks, headline, width, letters=True)).rstrip("\n")


def _coloured(blocks, headline, width):
    from rich.text import Text

    chunks, text = num_chunks(blocks), Text()
    for piece, block in _pieces(blocks, headline, width, letters=False):
        if block:
            colour = palette.shade(block.kind, block.chunk, chunks)
            text.append(piece, style=f"{palette.ink(colour)} on {colour}")
        else:
            text.append(piece)
    text.rstrip()
    return text


def _pieces(blocks, headline, width, letters):
    """The page as (text, the block that it shows or None)."""
    blocks = from_zero(blocks)
    ranks, total = by_rank(blocks), summary(blocks)
    label = len(f"rank {max(ranks, default=0)} ")
    scale = fit(blocks, max(10, width - label), letters)
    if headline:
        yield headline + "\n\n", None
    lines = {rank: paint(blocks, scale) for rank, blocks in ranks.items()}
    for band in range(scale.bands):
        yield " " * label + ruler(scale, band) + "\n", None
        for rank, segments in lines.items():
            yield f"rank {rank}".ljust(label), None
            for segment in cut(segments, band * scale.band, scale.band):
                yield face(segment, letters), segment.block
            yield "\n", None
        yield "\n", None
    yield from _legend(blocks, scale, letters)
    yield _table(total), None


def fit(blocks: Timeline, columns: int, letters: bool) -> Scale:
    """The scale at which a timeline fits into ``columns``: numbers readable if up to MAX_BANDS bands are enough for that."""
    makespan, short = max((b.end for b in blocks), default=0.0), short_duration(blocks)
    if not short:
        return Scale(0.0, columns, columns, False)
    cell = len(str(max(b.micro_batch for b in blocks))) + 1 + letters
    per_unit = cell / short
    needed = math.ceil(makespan * per_unit - 1e-6)
    if needed <= columns * MAX_BANDS:
        return Scale(per_unit, needed, math.ceil(needed / math.ceil(needed / columns)), False)
    return Scale(columns / makespan, columns, columns, True)


def paint(blocks: Timeline, scale: Scale) -> list[Segment]:
    """One rank's columns as segments: each column shows the block that runs in its middle."""
    starts = [block.start for block in blocks]
    segments: list[Segment] = []
    for column in range(scale.columns):
        now = (column + 0.5) / scale.per_unit if scale.per_unit else math.inf
        at = bisect.bisect_right(starts, now) - 1
        block = blocks[at] if at >= 0 and now < blocks[at].end else None
        if segments and segments[-1].block is block:
            segments[-1] = Segment(segments[-1].width + 1, block)
        else:
            segments.append(Segment(1, block))
    return segments


def cut(segments: list[Segment], start: int, width: int) -> list[Segment]:
    """The segments of the columns from ``start`` on, ``width`` of them."""
    inside, column = [], 0
    for segment in segments:
        first, last = max(column, start), min(column + segment.width, start + width)
        if first < last:
            inside.append(Segment(last - first, segment.block))
        column += segment.width
    return inside


def face(segment: Segment, letters: bool) -> str:
    """The characters of a segment: chunk (as a letter) and micro-batch as far as they fit."""
    width, block = segment
    if block is None:
        return (IDLE if letters else " ") * width
    if not letters:
        number = str(block.micro_batch)
        return (number if len(number) <= width else "").ljust(width)
    letter = string.ascii_lowercase[block.chunk % 26]
    if block.kind != "F":
        letter = letter.upper()
    label = f"{letter}{block.micro_batch}"
    return (label if len(label) <= width else letter).ljust(width, FILL[block.kind])


def ruler(scale: Scale, band: int) -> str:
    """Times above a band, at its ticks."""
    if not scale.per_unit:
        return ""
    step = nice_step(9 / scale.per_unit)
    line, tick = "", math.ceil(band * scale.band / scale.per_unit / step - 1e-9)
    while True:
        column = round(tick * step * scale.per_unit) - band * scale.band
        mark = f"|{tick * step:g}"
        if column + len(mark) > scale.band:
            return line
        line = line.ljust(column) + mark
        tick += 1


def nice_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= least * (1 - 1e-9))


def _legend(blocks, scale, letters):
    kinds = [kind for kind in palette.NAMES if any(block.kind == kind for block in blocks)]
    chunks = num_chunks(blocks)
    for kind in kinds:
        yield f"{palette.NAMES[kind]} ", None
        shown = range(chunks) if chunks <= 8 else (0, chunks - 1)
        for chunk in shown:
            block = Block(0, 0, 0, kind, chunk, 0)
            if letters:
                yield (", " if chunk else "") + f"{face(Segment(1, block), True)}{FILL[kind]} chunk {chunk}", None
            else:
                yield f" {chunk} ", block
        yield "   ", None
    yield (f"{IDLE} idle" if letters else "colour: kind, shade: chunk, number: micro-batch") + "\n", None
    if scale.squeezed:
        unit = f"{1 / scale.per_unit:.3g}"
        yield f"squeezed: a column is {unit} units of time, too little for numbers; widen the terminal or use --png\n", None
    yield "\n", None


def _table(total):
    lines = [f"makespan {format_time(total.makespan)}, idle {100 * total.mean_idle:.1f} %"]
    lines.append("rank   idle    peak (chunks held)")
    for rank, (idle, peak) in enumerate(zip(total.idle_share, total.peak_activations)):
        lines.append(f"{rank:4} {100 * idle:5.1f} %  {peak:4}")
    return "\n".join(lines) + "\n"
