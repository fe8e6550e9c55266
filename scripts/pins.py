"""Write the hashes of all pinned versions: `make pins`, with the pip of .venv and the index that it is set up with.

    constraints.txt          versions, edited by hand      -> requirements/pinned.txt
    requirements/lowest.txt  the lowest that are accepted  -> requirements/pinned-lowest.txt
    requirements/audit.txt   what `make audit` runs        -> requirements/pinned-audit.txt
    requirements/docs.txt    what `make docs` runs         -> requirements/pinned-docs.txt
    requirements/kubernetes.txt  what tests/deploy runs    -> requirements/pinned-kubernetes.txt
    the extra `app`          what the image has            -> requirements/pinned-app.txt

One line for each version, with the hashes of its files for Linux on x86-64 and ARM, and of its source. Nothing is resolved.
`--missing` says what the project needs here and is not installed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from typing import Any

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "celery-idempotency"
PYTHONS = ("cp311", "cp312", "cp313", "py3", "py2.py3")
# Of the image, and what builds the project there.
IMAGE_PYTHON, BUILDS = "3.12", "setuptools"
HERE = ("app", "services", "dev")
_PLATFORM = re.compile(r"any|manylinux.*_(x86_64|aarch64)|linux_(x86_64|aarch64)")
Links = Callable[[str], list[Any]]
_HEAD = "# Written by `make pins` from {}: the hash of every file that may be installed.\n"


def main() -> None:
    """Write the files; exit with a message if a version has no file."""
    if sys.argv[1:] == ["--missing"]:
        missing = [name for name in sorted(closure(PROJECT, HERE)) if not _is_installed(name)]
        sys.exit(f"not installed: {', '.join(missing)}" if missing else None)
    links = _links()
    pinned = _write("constraints.txt", "pinned.txt", links)
    _write("requirements/lowest.txt", "pinned-lowest.txt", links)
    _write("requirements/audit.txt", "pinned-audit.txt", links)
    _write("requirements/docs.txt", "pinned-docs.txt", links)
    _write("requirements/kubernetes.txt", "pinned-kubernetes.txt", links)
    wanted = {*closure(PROJECT, ["app"], IMAGE_PYTHON), BUILDS}
    lines = [line for line in pinned if name_of(line) in wanted]
    _save("pinned-app.txt", "pinned.txt", lines)


def closure(project: str, extras: Collection[str], python: str | None = None) -> set[str]:
    """The names of all that a project needs with these extras, by what is installed here. `python`: under another version."""
    environment = {} if python is None else {"python_version": python, "python_full_version": f"{python}.0"}
    found: set[str] = set()
    waiting = [(project, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        for each in map(Requirement, _requires(name)):
            environments = [{**environment, "extra": extra} for extra in ("", *wanted)]
            if each.marker is None or any(map(each.marker.evaluate, environments)):
                found.add(canonicalize_name(each.name))
                waiting.append((canonicalize_name(each.name), frozenset(each.extras)))
    return found - {project}


def name_of(line: str) -> str:
    """The name of the package that a line pins."""
    return canonicalize_name(re.split(r"[=;\s]", line, maxsplit=1)[0])


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _write(source: str, target: str, links: Links) -> list[str]:
    pins = [pin for line in (ROOT / source).read_text().splitlines() if (pin := line.partition("#")[0].strip())]
    with ThreadPoolExecutor(8) as threads:
        lines = list(threads.map(lambda pin: _hashed(pin, links), pins))
    _save(target, source, lines)
    return lines


def _save(target: str, source: str, lines: list[str]) -> None:
    (ROOT / "requirements" / target).write_text(_HEAD.format(source) + "".join(f"{line}\n" for line in lines))
    sys.stdout.write(f"requirements/{target}: {len(lines)} versions\n")


def _hashed(pin: str, links: Links) -> str:
    requirement = Requirement(pin)
    hashes = sorted({found for link in links(requirement.name) for found in _hashes(link, requirement)})
    if not hashes:
        sys.exit(f"pins: no file of {pin.partition(';')[0]} has a hash in the index; is there such a version?")
    return " ".join([pin, *(f"--hash=sha256:{each}" for each in hashes)])


def _hashes(link: Any, requirement: Requirement) -> Iterator[str]:
    try:
        if link.filename.endswith(".whl"):
            _, version, _, tags = parse_wheel_filename(link.filename)
            fits = any(
                _PLATFORM.fullmatch(tag.platform) and (tag.interpreter in PYTHONS or tag.abi == "abi3") for tag in tags
            )
        else:
            (_, version), fits = parse_sdist_filename(link.filename), True
    except ValueError:
        return  # an egg or an installer
    if fits and version in requirement.specifier and link.hash_name == "sha256" and link.hash:
        yield link.hash


def _links() -> Links:
    # pip has no public way to ask; its own is found here since pip 22
    from pip._internal.commands import create_command
    from pip._internal.index.collector import parse_links
    from pip._internal.models.link import Link

    command = create_command("download")
    options, _ = command.parse_args([])
    collector = command._build_package_finder(options, command._build_session(options))._link_collector

    def links(name: str) -> list[Any]:
        places = collector.search_scope.get_index_urls_locations(canonicalize_name(name))
        pages = [collector.fetch_response(Link(place)) for place in places if not place.startswith("file:")]
        return [link for page in pages if page is not None for link in parse_links(page)]

    return links


if __name__ == "__main__":
    main()
