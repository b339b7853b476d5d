"""Puts views on one self-contained HTML page, and their figures into files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from runflat.report.chart import Figure, Lines, table, to_csv
from runflat.report.device_map import DeviceMap, map_json, worst_frame
from runflat.report.map_svg import draw_map
from runflat.report.palette import CELLS, file_rules, page_rules
from runflat.report.svg import NARROW, WIDE, draw
from runflat.report.views import View

TEMPLATES = Path(__file__).parent / "templates"
CELL_WORDS = {
    "A": "trains",
    "D": "is leaving",
    "S": "starts or waits",
    "P": "healthy, no work",
    "L": "lost",
    "O": "out",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A figure as the template wants it."""

    key: str
    title: str
    says: str
    x_label: str
    has_lines: bool
    wide: Markup
    narrow: Markup
    csv: Markup
    head: list[str]
    rows: list[list[str]]
    num_left_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnMap:
    """The device map as the template wants it."""

    wide: Markup
    narrow: Markup
    last: int
    shown: int
    has_power: bool
    legend: list[tuple[str, str]]
    frames: Markup
    devices: Markup
    blocks: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnView:
    """A view with its figures drawn; the other attributes are those of `View`."""

    view: View
    figures: list[Drawn]
    map: DrawnMap | None

    def __getattr__(self, name: str) -> object:
        """Whatever else the template asks of the view."""
        return getattr(self.view, name)


def safe_json(text: str) -> Markup:
    """JSON that may stand inside a script element: nothing in it can end that element."""
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def draw_figure(figure: Figure) -> Drawn:
    """The figure, drawn for wide and narrow pages, with its numbers."""
    head, rows, left_out = table(figure)
    return Drawn(
        key=figure.key,
        title=figure.title,
        says=figure.says,
        x_label=figure.x_label if isinstance(figure, Lines) else "",
        has_lines=isinstance(figure, Lines),
        wide=Markup(draw(figure, WIDE)),
        narrow=Markup(draw(figure, NARROW)),
        csv=safe_json(json.dumps(to_csv(figure))),
        head=head,
        rows=rows,
        num_left_out=left_out,
    )


def draw_device_map(found: DeviceMap, shown: int) -> DrawnMap:
    """The map with frame `shown` drawn, and all frames for the page's script."""
    return DrawnMap(
        wide=Markup(draw_map(found, shown, WIDE)),
        narrow=Markup(draw_map(found, shown, NARROW)),
        last=len(found.frames) - 1,
        shown=shown,
        has_power=found.has_power,
        legend=[(color, CELL_WORDS[letter]) for letter, (color, _) in CELLS.items()],
        frames=safe_json(map_json(found)),
        devices=safe_json(json.dumps(found.devices)),
        blocks=safe_json(json.dumps([name for name, _ in found.blocks])),
    )


def draw_view(view: View, *, newest: bool = False) -> DrawnView:
    """The view with everything drawn; the map shows its worst moment, or the newest."""
    found = view.map
    shown = (len(found.frames) - 1 if newest else worst_frame(found)) if found else 0
    return DrawnView(
        view=view,
        figures=[draw_figure(figure) for figure in view.figures],
        map=draw_device_map(found, shown) if found else None,
    )


def environment() -> jinja2.Environment:
    """Where templates come from; whatever they are given is escaped unless it is marked as safe."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )


def _page(template: str, views: Sequence[DrawnView], title: str, connect: str, **more: object) -> str:
    return (
        environment()
        .get_template(template)
        .render(
            views=views,
            title=title,
            connect=connect,
            css=Markup(page_rules() + (TEMPLATES / "page.css").read_text(encoding="utf-8")),
            js=Markup((TEMPLATES / "page.js").read_text(encoding="utf-8")),
            **more,
        )
    )


def render_live(view: View, *, may_act: bool) -> str:
    """The page of a running job, which listens for what changes; `may_act` puts the form on it that asks devices."""
    live_js = Markup((TEMPLATES / "live.js").read_text(encoding="utf-8"))
    drawn = draw_view(view, newest=True)
    return _page("live.html", [drawn], view.name, "'self'", may_act=may_act, live_js=live_js)


def live_parts(view: View) -> dict[str, str]:
    """HTML by the id of the element whose content it is; the map, which goes its own way, is not among them."""
    drawn = draw_view(view)
    macros: Any = environment().get_template("parts.html").module
    return {f"{view.key}-before": str(macros.before(drawn)), f"{view.key}-after": str(macros.after(drawn))}


def render(views: Sequence[View], title: str) -> str:
    """One HTML page that needs nothing else."""
    return _page("page.html", [draw_view(view) for view in views], title, "'none'")


def write_figures(views: Sequence[View], folder: Path) -> list[Path]:
    """Write each figure as SVG, PNG and CSV; returns the files."""
    from runflat.report.png import save_png  # matplotlib loads slowly, and only files need it

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for view in views:
        for figure in view.figures:
            base = folder / f"{view.key}-{figure.key}"
            base.with_suffix(".svg").write_text(standalone(draw(figure, WIDE), view.source), encoding="utf-8")
            base.with_suffix(".csv").write_text(to_csv(figure), encoding="utf-8")
            save_png(figure, base.with_suffix(".png"), _credit(view))
            written += [base.with_suffix(suffix) for suffix in (".svg", ".png", ".csv")]
        if view.map:
            path = folder / f"{view.key}-map.svg"
            shown = worst_frame(view.map)
            path.write_text(standalone(draw_map(view.map, shown, WIDE), view.source), encoding="utf-8")
            path.with_suffix(".csv").write_text(map_csv(view.map), encoding="utf-8")
            written += [path, path.with_suffix(".csv")]
    return written


def _credit(view: View) -> str:
    return f"{'emulated devices · ' if view.is_emulated else ''}{view.source}"


def standalone(svg: str, source: str) -> str:
    """The SVG as a file of its own: styles inside, white behind, and where it comes from."""
    start, _, rest = svg.partition(">")
    about = Markup.escape(source)
    back = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return f"{start}><metadata>{about}</metadata><style>{file_rules()}</style>{back}{rest}\n"


def map_csv(found: DeviceMap) -> str:
    """Every change of every device, as CSV."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    write(["time_s", "device", "state", "place", "units", "power", "what happened"])
    devices = found.devices
    for frame in found.frames:
        for index, look in frame.cells:
            row = [repr(frame.time_s), devices[index], look.state, look.place, look.units, look.power]
            write([*row, frame.label])
    return out.getvalue()
