"""The texts of e-mails: a plain one and an HTML one from the same values, which are escaped in the HTML."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

# A name that a template has and its values have not is an error, and no gap in a letter.
_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    keep_trailing_newline=True,
)


def render(name: str, **values: str) -> tuple[str, str]:
    """The plain text and the HTML of an e-mail. Raises Jinja's errors: a missing template or value is our own mistake."""
    text, html = (_ENVIRONMENT.get_template(f"{name}.{kind}").render(values) for kind in ("txt", "html"))
    return text, html
