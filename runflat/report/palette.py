"""The colours of figures and pages: each name has one for light and one for dark surroundings."""

from __future__ import annotations

from collections.abc import Mapping

COLORS: Mapping[str, tuple[str, str]] = {
    "page": ("#f6f6f3", "#121417"),
    "card": ("#ffffff", "#1b1e23"),
    "ink": ("#1b1d20", "#eceef0"),
    "muted": ("#565c66", "#a9b0ba"),
    "grid": ("#e6e6e1", "#2d3138"),
    "edge": ("#d9d9d3", "#363b43"),
    "quiet": ("#eef1ee", "#252a30"),
    "blue": ("#2563a8", "#79b4f0"),
    "orange": ("#b45309", "#f2a65a"),
    "green": ("#1f7a4d", "#5fc795"),
    "purple": ("#6d47a8", "#bd9df0"),
    "teal": ("#0f7480", "#58c5d1"),
    "brown": ("#80601a", "#d6b65c"),
    "pink": ("#ad3a71", "#f08fbc"),
    "red": ("#b8322a", "#f4847c"),
    "grey": ("#636a75", "#9aa2ae"),
    "cell-active": ("#d5e8dc", "#23483a"),
    "cell-lost": ("#b8322a", "#c43d34"),
    "cell-standby": ("#f6d79b", "#6b4d12"),
    "cell-draining": ("#f3c19b", "#74401a"),
    "cell-parked": ("#d3d6db", "#3f454e"),
    "cell-out": ("#4a4f57", "#0c0d0f"),
    "on-dark": ("#ffffff", "#ffffff"),
}
"""Name -> (on light, on dark). Words in `ink`, `muted` and the eight hues reach a contrast of 4.5 on `card`."""

HUES = ("blue", "orange", "green", "purple", "teal", "brown", "pink", "red", "grey")
CELLS = {
    "A": ("cell-active", "ink"),
    "L": ("cell-lost", "on-dark"),
    "S": ("cell-standby", "ink"),
    "D": ("cell-draining", "ink"),
    "P": ("cell-parked", "ink"),
    "O": ("cell-out", "on-dark"),
}
"""Letter of a cell's look -> (colour of the cell, of its words)."""

DRAWING = """
svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;font-size:12px;fill:VAR(ink)}
svg .mut{fill:VAR(muted)} svg .num{fill:VAR(muted);font-variant-numeric:tabular-nums}
svg .strong{fill:VAR(ink);font-weight:600} svg .tiny{font-size:9.5px} svg .id{font-weight:600} svg .sign{font-size:10px}
svg .head{font-weight:600} svg .head.hit{fill:VAR(red)}
svg .grid{stroke:VAR(grid);fill:none} svg .axis{stroke:VAR(muted);fill:none} svg .join{stroke:VAR(muted);fill:none}
svg .line{fill:none;stroke-width:1.8;stroke-linejoin:round} svg .band{opacity:.16;stroke:none}
svg .tick{stroke-width:1;stroke-dasharray:2 3;fill:none;opacity:.75} svg .cell{stroke:VAR(card);stroke-width:.5}
"""


def _rules(variable: str) -> str:
    text = DRAWING
    for name in COLORS:
        text = text.replace(f"VAR({name})", variable.format(name))
    for name in HUES:
        text += f"svg .s-{name}{{stroke:{variable.format(name)}}} svg .f-{name}{{fill:{variable.format(name)}}}\n"
    for letter, (cell, words) in CELLS.items():
        text += f"svg .m-{letter}{{fill:{variable.format(cell)}}} svg .t-{letter}{{fill:{variable.format(words)}}}\n"
    return text


def page_rules() -> str:
    """Style rules of drawings inside a page, which follow its light or dark scheme."""
    variables = "".join(f"--{name}:light-dark({light},{dark});" for name, (light, dark) in COLORS.items())
    return f":root{{{variables}}}\n{_rules('var(--{})')}"


def file_rules() -> str:
    """Style rules for a drawing in a file of its own, on white."""
    text = _rules("var(--{})")
    for name, (light, _) in COLORS.items():
        text = text.replace(f"var(--{name})", light)
    return text
