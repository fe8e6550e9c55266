"""What MkDocs does beside its own work, in .venv-docs: diagrams become pictures, and the pages' texts are kept beside them."""

from __future__ import annotations

import hashlib
import html
import re
import shutil
from pathlib import Path
from typing import Any

import mmdr
from mkdocs.structure.files import File

_DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# A paragraph whose first line is a name, a gap, and what it means.
_OPTIONS = re.compile(r"<p>(\w+ {3,}\S[^\n]*\n.*?)</p>", re.DOTALL)


def _picture(diagram: str) -> str:
    """The path of a diagram's picture, from the top of the site. Another diagram has another."""
    return f"pictures/{hashlib.sha256(diagram.encode()).hexdigest()[:16]}.svg"


def on_files(files: Any, *, config: Any) -> Any:
    """Draw all diagrams. A script that draws them in the reader's browser would be loaded from elsewhere, or weigh megabytes."""
    found = {diagram for page in files.documentation_pages() for diagram in _DIAGRAM.findall(page.content_string)}
    for diagram in sorted(found):
        files.append(File.generated(config, _picture(diagram), content=mmdr.render(diagram).svg()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Show the picture of each diagram, and its source for those who cannot see it."""
    up = "../" * page.file.src_uri.count("/")

    def shown(found: re.Match[str]) -> str:
        source = html.escape(found[1])
        address = f"{up}{_picture(found[1])}"
        picture = (
            f'<a href="{address}"><img class="diagram" alt="a diagram, whose source is below" src="{address}"></a>'
        )
        return f"{picture}\n\n<details><summary>as text</summary><pre>{source}</pre></details>\n"

    return _DIAGRAM.sub(shown, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Keep the columns of a docstring's list of options."""
    return _OPTIONS.sub(lambda found: f"<pre>{re.sub('</?(?:code|em)>', '', found[1])}</pre>", content)


def on_post_build(*, config: Any) -> None:
    """Keep the Markdown of each page beside it: llms.txt leads there."""
    pages, site = Path(config.docs_dir), Path(config.site_dir)
    for page in pages.rglob("*.md"):
        shutil.copyfile(page, site / page.relative_to(pages))
