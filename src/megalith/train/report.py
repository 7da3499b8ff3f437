"""``report.html``: one page that shows all that a run folder holds.

It needs nothing but the folder's files, so it can be written while a run goes on, after it was
killed, or years later. The page needs nothing but itself: no network, font or script from outside.
"""

from __future__ import annotations

import functools
import time
from importlib import resources
from pathlib import Path

import jinja2

import megalith
from megalith.core.runs import RunFolder, write_whole
from megalith.train import charts, sections
from megalith.train.history import read_history


def write_report(folder: RunFolder | Path) -> Path:
    """Write the page of the run in ``folder`` and return its path.

    Args:
        folder: a run folder, finished or not.
    """
    run = read_history(folder)
    drawn = sections.curves(run)
    page = _template().render(
        name=run.folder.path.resolve().name,
        version=megalith.__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
        verdict=sections.verdict(run),
        about=sections.about(run),
        tiles=sections.tiles(run),
        charts=drawn,
        readouts=[c.readout() for c in drawn],
        split=sections.time_split(run),
        planned=sections.planned(run),
        samples=sections.texts(run),
        events=sections.events(run),
        checkpoints=sections.checkpoints(run),
        commands=sections.commands(run),
        recipe=run.recipe_text,
        environment=sections.flat(run.environment),
    )
    # A model may write half of a surrogate pair, which UTF-8 cannot hold.
    write_whole(run.folder.report, page.encode("utf-8", "replace").decode("utf-8"))
    return run.folder.report


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["dots"] = charts.dots
    file = resources.files("megalith.train") / "report_template.html"
    return environment.from_string(file.read_text(encoding="utf-8"))
