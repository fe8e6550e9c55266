"""What the documentation shows is run by a test or says why not, its commands parse, its settings exist, its links lead to headings."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from functools import cache
from urllib.parse import urlsplit

import click
import pytest
from celery.app.defaults import NAMESPACES, flatten
from typer.main import get_command

from idempotency.cli import root
from idempotency.contrib.django.databases import ALIAS_SETTING
from idempotency.environment import Environment
from idempotency.settings import PREFIX, Settings
from tests.support.documents import ROOT, blocks_in, every_block, pages
from tests.unit.test_runbooks import UsageError, parse, parse_celery

# The tests that run the blocks of other languages than Python, for which tests/unit/test_documents.py has the same list.
RUN_BY = {
    ("docs/api.md", "sh"): "tests/pipeline/test_api.py",
    ("docs/api.md", "json"): "tests/pipeline/test_api.py",
    ("docs/audit-past.md", "text"): "tests/integration/test_audit_past.py",
    ("docs/cells.md", "sh"): "tests/cells/test_page.py",
    ("docs/cells.md", "sql"): "tests/cells/test_page.py",
    ("docs/django.md", "python settings"): "tests/django/test_page.py",
    ("docs/existing-celery.md", "diff"): "tests/unit/test_documents.py",
    ("docs/monitoring.md", "json"): "tests/unit/test_snippets.py",
    ("docs/order-placement.md", "mermaid"): "tests/unit/test_flow.py",
    ("docs/partitions.md", "sql"): "tests/integration/test_pages.py",
    ("docs/payment-webhooks.md", "json"): "tests/unit/test_snippets.py",
    ("docs/protocol.md", "mermaid"): "tests/pipeline/test_site.py",
    ("docs/restore.md", "sql"): "tests/orders/test_restore.py",
    ("docs/returns.md", "mermaid"): "tests/unit/test_flow.py",
    ("docs/rights.md", "sql"): "tests/integration/test_rights.py",
    ("docs/sagas.md", "mermaid"): "tests/sagas/test_page.py",
    ("docs/sagas.md", "sql"): "tests/sagas/test_page.py",
    ("docs/sandbox.md", "sh"): "tests/integration/provider/test_page.py",
    ("docs/streams.md", "sh"): "tests/streams/test_page.py",
    ("docs/streams.md", "text"): "tests/streams/test_page.py",
    ("docs/tenants.md", "sql"): "tests/integration/test_roles.py",
    ("docs/tutorial.md", "sh"): "tests/pipeline/test_tutorial.py",
    ("docs/tutorial.md", "text"): "tests/pipeline/test_tutorial.py",
    ("docs/types.md", "python django"): "tests/django/test_page.py",
}
# What no test runs: more of it is a decision.
NOT_RUN = 2
NAMED = re.compile(r"`([A-Za-z_]+)`")
# Commands of other programs, which nothing here can parse.
OTHERS = {"aws", "cd", "curl", "eval", "export", "pip", "psql", "ruff", "uvicorn"}
MAKE = re.compile(r"^([a-z-]+):.*## ", re.MULTILINE)
# A line that shows what a command may be given, and is none that can be typed.
SYNOPSIS = re.compile(r"[\[\]|<>…]|\.\.\.")


def test_every_block_is_run_or_says_why_not() -> None:
    found = {(page, block.language) for page in pages() for block in every_block(page) if block.not_run is None}
    # a drawing is for the eye, and Python without more has a list of its own
    assert {each for each in found if each[1] not in ("", "python")} == set(RUN_BY)


@pytest.mark.parametrize("page", sorted({page for page, _ in RUN_BY}))
def test_the_test_that_runs_a_block_names_its_page(page: str) -> None:
    for test in {test for (named, _), test in RUN_BY.items() if named == page}:
        assert page.removeprefix("docs/") in (ROOT / test).read_text()


def test_what_is_not_run_is_little_and_says_why() -> None:
    why = {(page, block.not_run) for page in pages() for block in every_block(page) if block.not_run is not None}
    assert len(why) == NOT_RUN, "\n".join(f"{page}: {reason}" for page, reason in why)


def test_a_block_that_is_not_run_is_noticed() -> None:
    text = (
        "```bash\nrm x\n```\n\n<!-- not run: it needs a moon -->\n```console\n$ fly\n```\n\n  ```python\n  1\n  ```\n"
    )
    assert [(block.language, block.not_run) for block in blocks_in(text)] == [
        ("bash", None), ("console", "it needs a moon"), ("python", None),
    ]  # fmt: skip


@pytest.mark.parametrize("page", ["docs/monitoring.md", "docs/payment-webhooks.md"])
def test_a_document_is_json_whose_fields_are_described(page: str) -> None:
    (block,) = [block for block in every_block(page) if block.language == "json"]
    document = json.loads(block.text)
    text = (ROOT / page).read_text().replace(block.text, "")
    for each in document.get("alerts", [document]):
        missing = [name for name in each if not re.search(rf"`[^`]*\b{name}\b", text)]
        assert set(missing) <= {"id", "charge_id", "currency", "occurred_at", "payment_id", "service"}


# ---------------------------------------------------------------- commands


def indented(page: str) -> list[str]:
    """The lines of a page's indented blocks; one that a backslash ends with the next."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    found = "\n".join(
        line.strip()
        for part in re.split(r"\n\s*\n", text)
        for line in part.splitlines()
        if all(each.startswith("    ") for each in part.splitlines() if each)
    )
    return found.replace("\\\n", " ").splitlines()


def typed(line: str) -> tuple[str, list[str]]:
    """The program and the words of a line, without its comment, variables that are set for it, and what goes on in the background."""
    words = shlex.split(re.split(r"\s+#\s", line)[0].replace("<ann's>", "x").replace("<ben's>", "x").rstrip("&"))
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    return (words[0], words[1:]) if words else ("", [])


@cache
def commands() -> list[tuple[str, str]]:
    """All lines of the documentation that call a program, with their pages."""
    programs = {"idempotency", "celery", "make", "python"} | OTHERS
    found = []
    for page in pages():
        if page.startswith("docs/runbooks/"):
            continue  # tests/unit/test_runbooks.py
        fenced = [line for block in every_block(page) if block.language == "sh" for line in block.text.splitlines()]
        for line in [*indented(page), *fenced]:
            first = re.split(r"[\s(]", re.sub(r"^([A-Z_]+=\S* )+", "", line))[0]
            if first in programs and not line.startswith(f"{first} ="):
                found.append((page, line))
    return found


def check(line: str) -> None:
    """Raise unless the program takes this line."""
    if line.split()[0] in OTHERS or line.startswith("python -c"):
        return
    program, words = typed(re.split(r" (?:&&|2>|>>|<<) ?", line)[0])
    if words[:2] == ["manage.py", "idempotency"] and program == "python":
        program, words = "idempotency", words[2:]
    if program == "idempotency":
        synopsis(words) if SYNOPSIS.search(line) else parse(get_command(root.cli), [filled(word) for word in words])
    elif program == "celery":
        parse_celery(words)
    elif program == "make":
        targets = [word for word in words if "=" not in word]
        assert set(targets) <= set(MAKE.findall((ROOT / "Makefile").read_text())), line
    elif words[:1] == ["-m"] and words[1] not in ("venv", "pytest"):
        assert any((ROOT / words[1].replace(".", "/")).with_suffix(end).exists() for end in ("", ".py")), line


def filled(word: str) -> str:
    """A word, or what a person could put in its place."""
    return "1" if re.fullmatch(r"[A-Z_]+", word) else word


def synopsis(words: list[str]) -> None:
    """Raise unless all commands and options exist that a line with alternatives names."""
    first, *others = [part.split() for part in " ".join(words).split(" | ")]
    if others and all(re.fullmatch(r"[a-z-]+", part[0]) for part in others):  # `saga list | show | cancel`
        for part in others:
            check_options([*first[:-1], *part])
        check_options(first)
    else:
        check_options([word for word in re.split(r"[\s\[\]|]+", " ".join(words)) if word])


def check_options(words: list[str]) -> None:
    """Raise unless a command has these names and these options."""
    assert words[0] in root.COMMANDS, words
    command, rest = root.command(words[0]), words[1:]
    while below := getattr(command, "commands", None):
        if rest[0] not in below:
            assert command.invoke_without_command, words
            break
        command, rest = below[rest[0]], rest[1:]
    known = {option for each in command.params for option in each.opts}
    assert {word for word in rest if re.fullmatch(r"--[a-z-]+", word)} <= known, words


@pytest.mark.parametrize("page", sorted({page for page, _ in commands()}))
def test_every_command_of_a_page_parses(page: str) -> None:
    for named, line in commands():
        if named == page:
            try:
                check(line)
            except (click.UsageError, UsageError, SystemExit) as refused:
                pytest.fail(f"{line}: {refused}")


def test_the_commands_are_found() -> None:
    found = commands()
    assert len([line for _, line in found if line.startswith("idempotency")]) > 60
    assert len({page for page, _ in found}) > 20


@pytest.mark.parametrize(
    "wrong",
    [
        "idempotency nothing", "idempotency show KEY --everything", "idempotency list [--colour NAME]", "make nothing",
        "celery -A shop work", "python -m nothing.here", "idempotency saga list | show | dance",
    ],
)  # fmt: skip
def test_a_line_that_no_program_takes_is_noticed(wrong: str) -> None:
    with pytest.raises((click.UsageError, UsageError, AssertionError, SystemExit)):
        check(wrong)


# ---------------------------------------------------------------- settings, extras


def test_every_setting_that_a_page_sets_exists() -> None:
    known = {f"{PREFIX}{name}" for name in Settings.model_fields}
    celerys = {name for name, _ in flatten(NAMESPACES)}
    set_ = re.compile(r"(?:^|\s|conf\.)((?:idempotency|task|worker|broker|result|beat)_[a-z_]+)\s*=(?!=)", re.MULTILINE)
    found = {(page, name) for page in pages() for name in set_.findall((ROOT / page).read_text())}
    assert len(found) > 20
    per_call = {"idempotency_key"}  # of apply_async, and of what a body passes on
    assert {each for each in found if each[1] not in known | celerys | per_call} == set()


def test_every_variable_of_ours_that_a_page_names_is_read() -> None:
    fields = Environment.model_fields
    read = {str(field.validation_alias or name.upper()) for name, field in fields.items()}
    read |= {f"{PREFIX}{name}".upper() for name in Settings.model_fields} | {ALIAS_SETTING}
    found = {
        (page, name)
        for page in pages()
        for name in re.findall(r"\bIDEMPOTENCY_[A-Z_]+[A-Z]\b", (ROOT / page).read_text())
    }
    assert len(found) > 10
    assert {each for each in found if each[1] not in read} == set()


def test_every_extra_that_a_page_installs_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = {
        (page, extra)
        for page in pages()
        for named in re.findall(r"pip install [^\n`]*?\[([a-z,]+)\]", (ROOT / page).read_text())
        for extra in named.split(",")
        if "sqlalchemy" not in named and "asyncio" not in named
    }
    assert len(found) > 4
    assert {each for each in found if each[1] not in extras} == set()


# ---------------------------------------------------------------- links


def headings(page: str) -> set[str]:
    """The anchors of a page's headings, as a forge and the site make them."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[(.+?)\]\([^)]*\)", r"\1", each).lower()).replace(" ", "-") for each in found
    }


@pytest.mark.parametrize("page", pages())
def test_the_anchors_of_a_page_are_headings(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", (ROOT / page).read_text()):
        there = page if not target else str(((ROOT / page).parent / target).resolve().relative_to(ROOT))
        assert anchor in headings(there), f"{there} has no heading {anchor}"


def test_what_leads_elsewhere_is_an_address() -> None:
    found = {(page, link) for page in pages() for link in re.findall(r"\]\((\w+:[^)\s]*)\)", (ROOT / page).read_text())}
    assert found
    for _, link in found:
        parts = urlsplit(link)
        assert (parts.scheme, parts.username, parts.password) == ("https", None, None), link
        assert "." in (parts.hostname or ""), link


@pytest.mark.parametrize("page", pages())
def test_no_page_shows_a_picture_of_another_host(page: str) -> None:
    assert re.findall(r"!\[[^\]]*\]\(\w+:|<img[^>]*src=\"\w+:", (ROOT / page).read_text()) == []


def test_every_test_and_file_that_a_page_names_exists() -> None:
    tests = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    # those name tests of Celery and of a middleware
    texts = {page: (ROOT / page).read_text() for page in pages() if not page.endswith("-suite.md")}
    named = {(page, name) for page, text in texts.items() for name in re.findall(r"`(test_\w{12,})`", text)}
    files = {
        (page, path)
        for page, text in texts.items()
        for path in re.findall(r"`((?:tests|idempotency|scripts|tasks|drill|requirements|docs)/[\w/.-]+\.\w+)`", text)
    }
    assert len(named) > 50
    assert len(files) > 20
    # without the suffix, a name may be that of a module
    assert {each for each in named if each[1] not in tests and not list(ROOT.glob(f"tests/**/{each[1]}.py"))} == set()
    assert {each for each in files if not (ROOT / each[1]).exists()} == set()
