"""The runbooks, docs/runbooks, as pages: they are in the installed package as well.

Rendered without raw HTML, and with links to each other only as far as the page has them: a runbook is text.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources

from markdown_it import MarkdownIt
from markupsafe import Markup

from ..reasons import page_of

_NAME = re.compile(r"[a-z_]{1,64}|README")
_LINK = re.compile(r"([a-z_]+|README)\.md(#.*)?")


@cache
def names() -> tuple[str, ...]:
    """The pages that there are; none where the package was put together without them."""
    folder = _folder()
    found = (each.name for each in folder.iterdir()) if folder.is_dir() else ()
    return tuple(sorted(name.removesuffix(".md") for name in found if name.endswith(".md")))


@cache
def html(name: str) -> Markup | None:
    """A runbook's page as HTML that is safe to show; None: there is none of this name."""
    if _NAME.fullmatch(name) is None or name not in names():
        return None
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(_folder().joinpath(f"{name}.md").read_text(encoding="utf-8"))
    for token in (inner for each in tokens for inner in [each, *(each.children or ())]):
        if token.type == "link_open":
            found = _LINK.fullmatch(str(token.attrGet("href")))
            # what is elsewhere in the documentation is not in the package
            token.attrSet("href", f"/runbooks/{found[1]}" if found and found[1] in names() else "/runbooks/README")
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1]) + 2, 6)}"
    return Markup(parser.renderer.render(tokens, parser.options, {}))  # noqa: S704


def about(reason: str, own: tuple[str, ...]) -> str:
    """The name of the page about a reason or an alarm; one of the application's own that is not here is the page about refusals."""
    found = page_of(reason, own)
    return found if found in names() else page_of("")


def _folder() -> resources.abc.Traversable:
    return resources.files("idempotency.web").joinpath("runbooks")
