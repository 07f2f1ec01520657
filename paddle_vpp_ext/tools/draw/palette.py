"""Colours that text and pictures share: a hue per kind, a shade per chunk."""

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}

# Told apart by people who see no red or green, too: blue against orange first.
HUES = {"F": "#1f5fa8", "B": "#c8560a", "I": "#b3224f", "W": "#3d7d2c"}
LIGHTEST = 0.62


def shade(kind: str, chunk: int, num_chunks: int) -> str:
    """``#rrggbb``: the first chunk in the full colour, the last one the lightest."""
    white = LIGHTEST * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    return "#" + "".join(f"{round(c + (255 - c) * white):02x}" for c in _parts(HUES[kind]))


def ink(colour: str) -> str:
    """Black or white, whichever reads better on ``colour``."""
    red, green, blue = _parts(colour)
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def _parts(colour):
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
