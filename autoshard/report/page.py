"""Writes the report: one HTML file with everything in it, that loads nothing from elsewhere.

The last stop of the flow: what a run folder holds (`data`), told section by section
(`…_section.py`) and set by `templates/report.html.j2`.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from autoshard.files import write_text
from autoshard.report.data import ReportData, load_report_data
from autoshard.report.measurement_section import measurement_section
from autoshard.report.model_sections import cost_model_section, learning_section
from autoshard.report.rank_section import rank_section
from autoshard.report.sections import Section, module_command
from autoshard.report.summary_section import summary_section
from autoshard.report.svg import Picture
from autoshard.report.transfer_section import transfer_section
from autoshard.report.unseen_sections import evaluation_section
from autoshard.report.validation_section import validation_section

__all__ = ["ReportData", "load_report_data", "render_report", "report_sections", "write_report"]


def report_sections(data: ReportData) -> list[Section]:
    """All sections in the page's order, those without data included."""
    return [
        summary_section(data),
        measurement_section(data),
        cost_model_section(data),
        learning_section(data),
        rank_section(data),
        evaluation_section(data),
        transfer_section(data),
        validation_section(data),
    ]


def render_report(data: ReportData) -> str:
    """The page as text. Equal data give equal pages."""
    environment = Environment(
        loader=PackageLoader("autoshard.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["svg"] = _svg
    return environment.get_template("report.html.j2").render(
        sections=report_sections(data),
        folder=data.folder,
        command=module_command("autoshard.report", data.folder, "--out", "report.html"),
        version=metadata.version("autoshard"),
    )


def write_report(path: str | Path, data: ReportData) -> None:
    """Write the page, atomically.

    Args:
        path: of the HTML file; an old one is replaced.
        data: from `load_report_data`.

    Raises:
        InputError: the file cannot be written.
    """
    write_text(path, render_report(data))


def _svg(picture: Picture) -> Markup:
    return Markup(picture.svg)  # drawn by us; Matplotlib escapes its text
