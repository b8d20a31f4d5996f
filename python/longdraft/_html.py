"""Tables for notebooks."""

from html import escape
from typing import Iterable, Tuple


def table(title: str, rows: Iterable[Tuple[str, object]]) -> str:
    """Two columns under a title."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(str(value))}</td></tr>"
        for name, value in rows
    )
    return f"<table><caption style='text-align:left'>{escape(title)}</caption>{cells}</table>"


def curve(values: Iterable[float], width: int = 320, height: int = 80) -> str:
    """A line over its index, as SVG; nothing for fewer than two values."""
    points = [float(value) for value in values]
    if len(points) < 2:
        return ""
    low, high = min(points), max(points)
    span = (high - low) or 1.0
    places = (
        f"{index * (width - 4) / (len(points) - 1) + 2:.1f},{2 + (height - 4) * (high - value) / span:.1f}"
        for index, value in enumerate(points)
    )
    return (
        f"<svg width='{width}' height='{height}' role='img' aria-label='from {points[0]:.4g} to {points[-1]:.4g}'>"
        f"<polyline fill='none' stroke='currentColor' points='{' '.join(places)}'/></svg>"
    )
