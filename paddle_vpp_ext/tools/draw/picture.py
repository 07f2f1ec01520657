"""Timelines as a picture (PNG, SVG): a timeline per panel, plan and measured run one above the other."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Union

from . import palette, timeline
from .timeline import Timeline, by_rank, from_zero, num_chunks, short_duration, summary, to_timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
NEEDS = "pictures need matplotlib: pip install paddle_vpp_ext[viz]"

# Sizes in inches, or in points where they are of fonts.
ROW = 0.30
PANEL_GAP = 0.75
HEAD, FOOT, LEFT, RIGHT = 0.95, 0.55, 0.75, 1.35
NARROWEST, WIDEST, WITHOUT_NUMBERS = 8.5, 26.0, 15.0
CELL_PER_CHARACTER, CELL_MARGIN = 0.06, 0.075
SMALLEST_FONT, LARGEST_FONT = 5.0, 8.5
BAR = 0.86

PAPER, IDLE, TEXT, FAINT = "#ffffff", "#eceff2", "#1d2733", "#66727f"

# Beyond this many blocks an SVG would be slow to open: the bars are drawn as one image in it.
VECTOR_LIMIT = 20_000

STYLE = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.usetex": False,
    "text.color": TEXT,
    "axes.labelcolor": FAINT,
    "svg.fonttype": "none",  # text stays text: small files, and words can be searched
    "svg.hashsalt": "paddle_vpp_ext",
}


def save(
    path: Union[str, os.PathLike],
    panels: Mapping[str, Timeline],
    title: str = "",
    unit: str = "",
    format: Optional[str] = None,  # noqa: A002, the name that matplotlib's savefig has for it
) -> None:
    """Draws ``panels`` ({name: timeline}) below each other into ``path``.

    ``format``: png or svg, from the path's ending if not given. ``unit`` names the timelines' unit of
    time at the axis. Panels of about equal length share one scale. ImportError without
    matplotlib; ValueError for another format, no panels, or a row that is no block; OSError if
    ``path`` cannot be written.
    """
    chosen = format or Path(path).suffix[1:].lower()
    if chosen not in FORMATS:
        raise ValueError(f"{str(path)!r}: a picture is written as {' or '.join(FORMATS)}")
    matplotlib = _matplotlib()
    with matplotlib.rc_context(STYLE):
        drawn = figure(panels, title, unit)
        metadata = {"Date": None} if chosen == "svg" else None  # same plan, same bytes
        drawn.savefig(path, format=chosen, dpi=150, facecolor=PAPER, metadata=metadata)


def figure(panels: Mapping[str, Timeline], title: str = "", unit: str = "") -> "Figure":
    """The picture as a matplotlib Figure, outside pyplot: the user's backend and figures stay as they are."""
    matplotlib = _matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {name: from_zero(to_timeline(blocks)) for name, blocks in panels.items()}
    if not panels:
        raise ValueError("a picture needs at least one panel with a timeline")
    heights = [ROW * len(by_rank(blocks)) for blocks in panels.values()]
    spans = _spans(panels)
    width = max(_width(blocks, span) for blocks, span in zip(panels.values(), spans))
    size = LEFT + width + RIGHT, HEAD + sum(heights) + PANEL_GAP * (len(panels) - 1) + FOOT
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=size)
        FigureCanvasAgg(drawn)
        chunks = max(map(num_chunks, panels.values()))
        top = size[1] - HEAD
        for (name, blocks), height, span in zip(panels.items(), heights, spans):
            box = LEFT / size[0], (top - height) / size[1], width / size[0], height / size[1]
            _panel(drawn.add_axes(box), name, blocks, span, width, chunks, unit)
            top -= height + PANEL_GAP
        drawn.text(LEFT / size[0], 1 - 0.16 / size[1], title, va="top", fontsize=11, fontweight="bold")
        _legend(drawn, size, panels, chunks)
    return drawn


def _matplotlib():
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise ImportError(f"{NEEDS} ({error})") from None
    return matplotlib


def _spans(panels: dict[str, Timeline]) -> list[float]:
    """The length of each panel's time axis: one for all, unless one is more than four times another (other units)."""
    makespans = [summary(blocks).makespan or 1.0 for blocks in panels.values()]
    longest = max(makespans)
    return [longest] * len(makespans) if longest <= 4 * min(makespans) else makespans


def _width(blocks, span):
    """Inches in which most blocks show their micro-batch's number, or of a picture that does without."""
    digits = len(str(max((b.micro_batch for b in blocks), default=0)))
    short = short_duration(blocks) or span
    width = span / short * (digits * CELL_PER_CHARACTER + CELL_MARGIN)
    return max(NARROWEST, width) if width <= WIDEST else WITHOUT_NUMBERS


def _panel(axes, name, blocks, span, width, chunks, unit):
    ranks, total = by_rank(blocks), summary(blocks)
    axes.set(xlim=(0, span), ylim=(max(len(ranks), 1) - 0.5, -0.5), facecolor=PAPER)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_yticks(list(ranks), [f"rank {rank}" for rank in ranks], color=TEXT)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=FAINT, length=3)
    axes.set_xlabel(f"time ({unit})" if unit else "time", loc="left", fontsize=8, labelpad=2)
    for rank in ranks:
        axes.broken_barh([(0, total.makespan)], (rank - BAR / 2, BAR), facecolor=IDLE)
    _bars(axes, blocks, width / span, chunks)
    _numbers(axes, blocks, width / span, chunks)
    head = f"makespan {timeline.format_time(total.makespan)}   idle {100 * total.mean_idle:.1f} %"
    axes.annotate(name, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", fontweight="bold", fontsize=9.5)
    axes.annotate(head, (1, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", ha="right", color=FAINT)
    _columns(axes, total)


def _columns(axes, total):
    """Idle share and peak of each rank, at the right."""
    for x, words in ((0.62, "idle"), (1.15, "peak")):
        axes.annotate(words, (1, 1), (72 * x, 5), xycoords="axes fraction", textcoords="offset points", ha="right", color=FAINT)
    for rank, (idle, peak) in enumerate(zip(total.idle_share, total.peak_activations)):
        for x, words in ((0.62, f"{100 * idle:.1f} %"), (1.15, str(peak))):
            axes.annotate(
                words,
                (1, rank),
                (72 * x, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="center_baseline",
            )


def _bars(axes, blocks, per_unit, chunks):
    """A bar per block, with edges thin enough to leave something of it. ``per_unit``: inches in one unit of time."""
    looks: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for block in blocks:
        looks.setdefault((block.kind, block.chunk, block.rank), []).append((block.start, block.end - block.start))
    edge = min(0.6, 0.08 * 72 * short_duration(blocks) * per_unit)
    for (kind, chunk, rank), spans in looks.items():
        axes.broken_barh(
            spans,
            (rank - BAR / 2, BAR),
            facecolor=palette.shade(kind, chunk, chunks),
            edgecolor=PAPER,
            linewidth=edge,
            rasterized=len(blocks) > VECTOR_LIMIT,
        )


def _numbers(axes, blocks, per_unit, chunks):
    """Micro-batch numbers in one size, in the blocks that have room for them. ``per_unit``: inches in one unit of time."""
    digits = len(str(max((b.micro_batch for b in blocks), default=0)))
    room = short_duration(blocks) * per_unit
    font = min(LARGEST_FONT, 72 * (room - 0.03) / (0.64 * digits))
    if font < SMALLEST_FONT:
        return
    for block in blocks:
        if 72 * (block.end - block.start) * per_unit > 0.64 * font * len(str(block.micro_batch)):
            axes.text(
                (block.start + block.end) / 2,
                block.rank,
                str(block.micro_batch),
                fontsize=font,
                ha="center",
                va="center_baseline",
                color=palette.ink(palette.shade(block.kind, block.chunk, chunks)),
            )


def _legend(drawn, size, panels, chunks):
    """Kinds, each with the shades of its chunks, in one line below the title."""
    from matplotlib.patches import Rectangle

    kinds = [k for k in palette.NAMES if any(b.kind == k for blocks in panels.values() for b in blocks)]
    shown = list(range(chunks)) if chunks <= 8 else [0, chunks - 1]
    x, y, side = LEFT, size[1] - 0.57, 0.14

    def box(colour, words=""):
        drawn.add_artist(
            Rectangle(
                (x / size[0], y / size[1]),
                side / size[0],
                side / size[1],
                facecolor=colour,
                transform=drawn.transFigure,
            )
        )
        drawn.text(
            (x + side / 2) / size[0],
            (y + side / 2) / size[1],
            words,
            fontsize=6.5,
            ha="center",
            va="center_baseline",
            color=palette.ink(colour),
        )

    for kind in kinds:
        for chunk in shown:
            box(palette.shade(kind, chunk, chunks), str(chunk) if chunks > 1 else "")
            x += side + 0.02
        drawn.text((x + 0.04) / size[0], (y + side / 2) / size[1], palette.NAMES[kind], va="center_baseline")
        x += 0.30 + 0.075 * len(palette.NAMES[kind])
    box(IDLE)
    drawn.text((x + side + 0.06) / size[0], (y + side / 2) / size[1], "idle", va="center_baseline")
    words = ("shade: chunk;  " if chunks > 1 else "") + "number: micro-batch;  peak: chunks held at once"
    drawn.text((size[0] - RIGHT) / size[0], 0.14 / size[1], words, ha="right", va="center_baseline", color=FAINT, fontsize=8)
