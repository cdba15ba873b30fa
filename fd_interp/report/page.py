"""The report: one page that works offline, from verdicts, stages, figures and attention views."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from fd_interp.claims import Verdict
from fd_interp.report import attention
from fd_interp.report.figures import to_html
from fd_interp.stages import Stage

MOST_COLUMNS = 6
"""Cases up to which claims at a glance are a matrix; with more, each claim lists its cases."""


@dataclass(frozen=True)
class Section:
    """One run, or group of seeds, on the page."""

    title: str
    text: str
    """One paragraph: what was run, and what to look for."""
    stages: Sequence[Stage] = ()
    figures: Sequence[go.Figure] = ()
    """Small ones, two in a row."""
    wide_figures: Sequence[go.Figure] = ()
    view: tuple[Sequence[str], Sequence[attention.AttentionFrame]] | None = None
    """Tokens of one sequence and its patterns over the steps."""
    links: Sequence[tuple[str, str]] = ()
    """Pages and files beside this one: what they are, and their path from here."""


@dataclass(frozen=True)
class Report:
    """Everything on the page, from top to bottom."""

    title: str
    source: str
    summary: str
    verdicts: Sequence[Verdict]
    sections: Sequence[Section]
    versions: dict[str, str] = field(default_factory=dict)


def report_page(report: Report) -> str:
    """The page as HTML; it loads nothing from anywhere.

    Raises:
        InputError: as `attention_fragment`.
    """
    claims = [verdict for verdict in report.verdicts if verdict.control is None]
    controls = [verdict for verdict in report.verdicts if verdict.control is not None]
    views = [
        attention.attention_fragment(*section.view, element_id=f"attention-{index}") if section.view else ""
        for index, section in enumerate(report.sections)
    ]
    return _template().render(
        report=report,
        claims=claims,
        controls=controls,
        holding=sum(verdict.holds for verdict in claims),
        failing_as_they_must=sum(verdict.holds for verdict in controls),
        most_columns=MOST_COLUMNS,
        zip=zip,
        glances=[_glance("claim", claims), _glance("control", controls)],
        sections=[
            {
                "section": section,
                "figures": [Markup(to_html(figure)) for figure in section.figures],
                "wide_figures": [Markup(to_html(figure)) for figure in section.wide_figures],
                "attention": Markup(view),
            }
            for section, view in zip(report.sections, views, strict=True)
        ],
        scripts=[Markup(attention.plotly_script()), *([Markup(attention.bundle_script())] if any(views) else [])],
    )


class Glance(NamedTuple):
    """Verdicts as a matrix: what is judged down, where across."""

    title: str
    columns: list[str]
    rows: list[tuple[str, str, list[Verdict | None]]]
    """Name, statement, and a verdict for each column; None where it was not judged."""


def _glance(title: str, verdicts: Sequence[Verdict]) -> Glance:
    """Ids are `case/limit/claim`: claims go down and cases across; of controls, cases with their claim go down."""
    down = {(_row(verdict), verdict.control or verdict.statement): None for verdict in verdicts}
    across = list({_column(verdict): None for verdict in verdicts})
    found = {(_row(verdict), _column(verdict)): verdict for verdict in verdicts}
    return Glance(title, across, [(row, text, [found.get((row, at)) for at in across]) for row, text in down])


def _row(verdict: Verdict) -> str:
    *where, claim = verdict.id.split("/")
    return claim if verdict.control is None else f"{where[0]}: {claim}"


def _column(verdict: Verdict) -> str:
    *where, _ = verdict.id.split("/")
    return " ".join(where) if verdict.control is None else " ".join(where[1:]) or "model"


@lru_cache
def _template() -> Any:
    return Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True).get_template(
        "report.html.jinja"
    )
