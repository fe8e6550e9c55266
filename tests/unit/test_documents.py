"""The documentation's Python examples are all run, its links lead somewhere, and its index has every page."""

from __future__ import annotations

import difflib
import re

import pytest

from idempotency.settings import Settings
from tests.support.documents import ROOT, blocks, pages, python_blocks

# The test that runs the Python examples of a page, and how many it runs.
RUN_BY = {
    "README.md": ("tests/integration/test_readme.py", 4),
    "docs/django.md": ("tests/django/test_page.py", 5),
    "docs/cells.md": ("tests/cells/test_page.py", 2),
    "docs/engines.md": ("tests/integration/test_pages.py", 1),
    "docs/batches.md": ("tests/integration/test_batch.py", 1),
    "docs/events.md": ("tests/integration/test_readme.py", 1),
    "docs/fastapi.md": ("tests/integration/test_pages.py", 1),
    "docs/http.md": ("tests/http/test_page.py", 2),
    "docs/operating.md": ("tests/integration/test_readme.py", 1),
    "docs/psycopg.md": ("tests/integration/test_pages.py", 1),
    "docs/sagas.md": ("tests/sagas/test_page.py", 4),
    "docs/sandbox.md": ("tests/integration/provider/test_page.py", 1),
    "docs/stores.md": ("tests/stores/test_page.py", 2),
    "docs/streams.md": ("tests/streams/test_page.py", 3),
    "docs/stripe.md": ("tests/integration/provider/test_stripe_page.py", 3),
    "docs/tasks.md": ("tests/integration/test_readme.py", 4),
    "docs/tenants.md": ("tests/integration/test_roles.py", 2),
    "docs/testing.md": ("tests/integration/test_fixtures_for_tests.py", 4),
    "docs/traces.md": ("tests/traces/test_page.py", 2),
    "docs/tutorial.md": ("tests/pipeline/test_tutorial.py", 1),
    "docs/types.md": ("tests/integration/test_readme.py", 1),
    "docs/web.md": ("tests/web/test_business_rows.py", 1),
    "docs/webhooks.md": ("tests/webhooks/test_page.py", 4),
    "docs/without-celery.md": ("tests/integration/test_without_celery.py", 1),
}


def test_every_python_example_of_the_documentation_is_run() -> None:
    found = {page: len(blocks) for page in pages() if (blocks := python_blocks(page))}
    assert found == {page: count for page, (_, count) in RUN_BY.items()}


@pytest.mark.parametrize("page", RUN_BY)
def test_the_test_that_runs_a_page_reads_it(page: str) -> None:
    test, _ = RUN_BY[page]
    assert f'"{page}"' in (ROOT / test).read_text()


def test_the_changes_of_an_existing_application_are_those_of_its_example() -> None:
    before, after = ((ROOT / "examples" / "adopt" / form / "shop.py").read_text() for form in ("before", "after"))
    changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    shown = [line for block in blocks("docs/existing-celery.md", "diff") for line in block.splitlines()]
    assert len(shown) > 10
    assert [line for line in shown if f"{line[0]} {line[1:]}" not in changed] == []


def test_the_index_has_every_page() -> None:
    linked = {f"docs/{target}" for target in re.findall(r"\]\(([^)#]+\.md)", (ROOT / "docs/README.md").read_text())}
    known = {page for page in pages() if page.startswith("docs/")} - {"docs/README.md"}
    # those have an index of their own: tests/unit/test_runbooks.py
    known = {page for page in known if not page.startswith("docs/runbooks/")} | {"docs/runbooks/README.md"}
    assert {page for page in linked if "/../" not in page} == known


@pytest.mark.parametrize("page", pages())
def test_the_links_of_a_page_lead_to_files(page: str) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    assert [target for target in targets if not ((ROOT / page).parent / target).exists()] == []


def test_the_readme_names_what_a_newcomer_looks_for() -> None:
    text = (ROOT / "README.md").read_text()
    for name in ("`Handle`", "idempotency.lookup(", "`make up`", "DATABASE_URL", "REDIS_URL", "BROKER_URL"):
        assert name in text


def test_the_page_of_settings_names_every_setting() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    names = [name for row in rows for name in re.findall("`([a-z_]+)`", row)]
    assert sorted(names) == sorted(Settings.model_fields)


def test_the_readme_is_for_the_first_hour() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150, "what is for later has a page in docs/"


def test_the_page_of_states_lists_every_crash_point_and_no_other() -> None:
    source = "".join(path.read_text() for path in (ROOT / "idempotency").rglob("*.py"))
    passed = set(re.findall(r'(?:crash_point\(|\bthen=)"(\w+(?:\.\w+)?)"', source))
    page = (ROOT / "docs" / "states.md").read_text()
    listed = set(re.findall(r"`(\w+(?:\.\w+)?)`", page[page.index("\nCrash points are ") :].partition("\n\n")[0]))
    assert listed == passed


# Rows that say in a few words what a folder has, on purpose.
SUMMED_UP = {"cli", "operate", "web"}


def modules_and_words() -> dict[str, tuple[set[str], set[str]]]:
    """Of each folder of the library that has a row in ARCHITECTURE: its modules, and what the row names."""
    rows = re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    return {
        folder: (
            {path.stem for path in (ROOT / "idempotency" / folder).glob("*.py")} - {"__init__"},
            set(re.findall(r"`(\w+)`", row)),
        )
        for folder, row in rows
    }


def test_every_folder_of_the_library_has_a_row_of_the_map() -> None:
    folders = {
        str(path.parent.relative_to(ROOT / "idempotency")) for path in (ROOT / "idempotency").rglob("__init__.py")
    }
    inner = {"contrib", *(each for each in folders if re.search(r"(migrations|management)", each))}
    assert folders - {"."} - inner == set(modules_and_words())


@pytest.mark.parametrize("folder", sorted(modules_and_words().keys() - SUMMED_UP))
def test_the_row_of_a_folder_names_each_of_its_modules(folder: str) -> None:
    modules, words = modules_and_words()[folder]
    assert modules
    assert modules - words == set()
