"""Put the pages of the site together for MkDocs, in var/docs/pages, and write llms.txt: `make docs`.

the repository's pages            as they are, in their places, with what they link to
reference/*.md                    which names are public, for mkdocstrings
reference/command-line.md         the commands' own help
llms.txt, llms-full.txt           the pages in the order of the navigation, for programs that read
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from idempotency.cli import root as commands

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "var" / "docs" / "pages"
# The pages of the reference: a title, and the modules whose `__all__` it shows; of a module without one, what is named here.
REFERENCE: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "idempotency": ("Tasks", {"idempotency": ()}),
    "events-and-sagas": ("Events and sagas", {"idempotency.sagas": ()}),
    "http-and-webhooks": (
        "HTTP and webhooks",
        {"idempotency.http": (), "idempotency.http.fastapi": ("as_response",), "idempotency.webhooks": ()},
    ),
    "streams": ("Streams", {"idempotency.streams": ()}),
    "queues-and-providers": (
        "Queues and providers",
        {"idempotency.queues": ("quorum_queue",), "idempotency.providers": ("ProviderContract",)},
    ),
    "django": ("Django", {"idempotency.contrib.django": ()}),
    "testing": ("Testing", {"idempotency.testing": ()}),
}
_LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)]*)?\)")
_STYLE = "img.diagram { background: white; max-width: 100%; }\n.md-typeset td code { word-break: normal; }\n"


def main() -> None:
    """Write all pages anew."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for page in pages():
        _copy(page)
    for name, text in reference():
        _write(f"reference/{name}.md", text)
    _write("site.css", _STYLE)
    (ROOT / "llms.txt").write_text(llms())
    _write("llms.txt", llms())
    _write("llms-full.txt", "\n\n".join((PAGES / page).read_text() for _, _, page in navigation()))
    sys.stdout.write(f"{len(list(PAGES.rglob('*.md')))} pages\n")


def pages() -> list[str]:
    """The pages of the repository, by their paths from its root."""
    found = [
        *ROOT.glob("[A-Z]*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*/README.md"),
        ROOT / "tests/README.md",
    ]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def navigation() -> Iterator[tuple[str, str, str]]:
    """The section, the title and the path of every page, in the order of the navigation."""
    for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]:
        ((section, inside),) = entry.items()
        for each in [inside] if isinstance(inside, str) else inside:
            ((title, page),) = each.items() if isinstance(each, dict) else [(None, each)]
            yield section, title or _title(page), page


def llms() -> str:
    """The text of llms.txt: a line for each page of the repository, with what it is for."""
    said = _descriptions()
    lines = ["# celery-idempotency", "", f"> {_first_sentence((ROOT / 'README.md').read_text())}"]
    before = None
    for section, title, page in navigation():
        if page.startswith("reference/"):
            continue  # they are made from docstrings, and are only in the site
        if section != before:
            lines += ["", f"## {section}", ""]
        before = section
        lines.append(f"- [{title}]({page}): {said.get(page) or _first_sentence((ROOT / page).read_text())}")
    return "\n".join(lines) + "\n"


def reference() -> Iterator[tuple[str, str]]:
    """The pages of the reference, by name: directives for mkdocstrings, and the help of the commands."""
    lines = [
        "# Reference",
        "",
        "What is public, from the docstrings; [upgrades](../docs/upgrades.md) says what may change.",
        "",
    ]
    for name, (title, modules) in REFERENCE.items():
        lines.append(f"- [{title}]({name}.md)")
        parts = [f"# {title}"]
        for module, chosen in modules.items():
            loaded = importlib.import_module(module)
            parts.append(f"`from {module} import …`")
            names = sorted(chosen or loaded.__all__, key=lambda each: (each[0].islower(), each))
            parts += [f"::: {_home(getattr(loaded, each), module, each)}" for each in names]
        yield name, "\n\n".join(parts) + "\n"
    lines += ["- [Command line](command-line.md)", "- [Settings](../docs/settings.md)", ""]
    yield "README", "\n".join(lines)
    yield "command-line", command_line()


def command_line() -> str:
    """The help of every command, as it prints it."""
    parts = ["# Command line", "`idempotency COMMAND --help` prints the same."]
    for name in commands.COMMANDS:
        parts += _helps(commands.command(name), name)
    return "\n\n".join(parts) + "\n"


def _helps(command: Any, name: str) -> Iterator[str]:
    inner = getattr(command, "commands", {})
    if not inner or command.invoke_without_command:
        rows = [_row(each) for each in command.params if not getattr(each, "hidden", False) and each.name != "help"]
        yield f"## `idempotency {name}`"
        yield command.help or ""
        if rows:
            yield "\n".join(["| option | |", "|---|---|", *rows])
    for each, below in inner.items():
        yield from _helps(below, f"{name} {each}")


def _row(option: Any) -> str:
    names = ", ".join(option.opts) if option.param_type_name == "option" else option.name.upper()
    said = re.sub(r"([|_*<\[`])", r"\\\1", " ".join((getattr(option, "help", None) or "").split()))
    return f"| `{names}`{' (required)' if option.required else ''} | {said} |"


def _home(thing: Any, module: str, name: str) -> str:
    """Where something is defined: the reference shows it from there, since a package may import it only when it is used."""
    if inspect.isclass(thing) or inspect.isfunction(thing):
        return f"{inspect.unwrap(thing).__module__}.{thing.__qualname__}"
    return f"{module}.{name}"


def _title(page: str) -> str:
    if page.startswith("reference/"):
        return REFERENCE.get(Path(page).stem, ("Command line", {}))[0]
    found = re.search(r"^# (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    return found[1].replace("`", "") if found else page


def _descriptions() -> dict[str, str]:
    """What the index of the documentation says of each page."""
    index = (ROOT / "docs" / "README.md").read_text()
    found = re.findall(r"^\| (\[.+?\) )\| (.+?) \|$", index, re.MULTILINE)
    return {
        str(Path("docs") / page): re.sub(r"\[(.+?)\]\([^)]*\)", r"\1", said)
        for links, said in found
        for page in re.findall(r"\]\(([^)#]+)", links)
    }


def _first_sentence(text: str) -> str:
    """The first sentence of a page's text, without links."""
    body = next(part for part in text.split("\n\n")[1:] if part[:1] not in ("#", "|", "`", "-", " ", "<"))
    plain = re.sub(r"\[(.+?)\]\([^)]*\)", r"\1", " ".join(body.split())).replace("**", "")
    return re.split(r"(?<=[.:]) (?=[A-Z`])", plain, maxsplit=1)[0]


def _copy(page: str) -> None:
    """A page, and the files that it links to. A link to a directory leads to the page in it."""
    text = (ROOT / page).read_text()
    here = (ROOT / page).parent

    def leads(found: re.Match[str]) -> str:
        target = (here / found[1]).resolve()
        if target.is_dir():
            return f"]({found[1].rstrip('/')}/README.md{found[2] or ''})"
        if target.suffix != ".md" and target.is_file():
            copied = PAGES / target.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, copied)
        return found[0]

    _write(page, _LINK.sub(leads, text))


def _write(path: str, text: str) -> None:
    (PAGES / path).parent.mkdir(parents=True, exist_ok=True)
    (PAGES / path).write_text(text)


if __name__ == "__main__":
    main()
