"""The documentation as a site: what `make docs` puts together, and (long) what it builds.

The diagrams of docs/protocol.md and other pages are drawn by the build.
"""

from __future__ import annotations

import os
import re
import subprocess
from html.parser import HTMLParser

import pytest

from scripts import docs
from tests.support.documents import ROOT

SITE = ROOT / "var" / "docs" / "site"


def test_llms_txt_is_what_the_navigation_says() -> None:
    assert (ROOT / "llms.txt").read_text() == docs.llms(), "run python -m scripts.docs"


def test_every_page_is_in_the_navigation_or_in_an_index_of_its_own() -> None:
    named = {page for _, _, page in docs.navigation() if not page.startswith("reference/")}
    elsewhere = ("docs/decisions/", "docs/runbooks/", "examples/")
    assert {page for page in docs.pages() if not page.startswith(elsewhere)} == named - {"docs/runbooks/README.md"}


def test_the_reference_has_every_public_name_and_command() -> None:
    import idempotency
    from idempotency.cli.root import COMMANDS

    pages = dict(docs.reference())
    assert len(re.findall(r"^::: ", pages["idempotency"], re.MULTILINE)) == len(idempotency.__all__)
    named = {
        page.removeprefix("reference/").removesuffix(".md") for _, _, page in docs.navigation() if "reference/" in page
    }
    assert set(pages) == named
    assert {name for name in COMMANDS if f"`idempotency {name}" not in pages["command-line"]} == set()
    assert "--within" in pages["command-line"]


class Loaded(HTMLParser):
    """What a browser loads for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.addresses.append(str(given["src"]))
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.addresses.append(str(given.get("href")))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere() -> None:
    # the ARGS of a `make` that runs these tests are not for this one
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKEOVERRIDES", "ARGS")
    }
    built = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = list(SITE.rglob("*.html"))
    assert len(pages) > 150
    loaded = Loaded()
    for page in pages:
        loaded.feed(page.read_text())
    assert len(loaded.addresses) > len(pages)
    assert [
        address for address in loaded.addresses if re.match(r"\w+:|//", address) and not address.startswith("data:")
    ] == []
    assert "pictures/" in (SITE / "docs" / "protocol.html").read_text()
    assert list((SITE / "pictures").glob("*.svg"))
    linked = [path.read_text() for end in ("svg", "css") for path in SITE.rglob(f"*.{end}")]
    assert [
        found for text in linked for found in re.findall(r"(?:url\(|href=)[\"']?https?:[^\"')]*|@import[^;]*", text)
    ] == []
    for _, _, named in docs.navigation():
        assert (SITE / named).is_file(), f"llms.txt leads to {named}"
    assert (SITE / "llms.txt").read_text() == docs.llms()
