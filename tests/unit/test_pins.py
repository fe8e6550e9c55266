"""The pinned versions: each file that is installed has a known hash, and nothing is installed that is not pinned."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
# Each list of hashes, and the versions that it was made from.
LISTS = {
    "pinned.txt": "constraints.txt",
    "pinned-lowest.txt": "requirements/lowest.txt",
    "pinned-audit.txt": "requirements/audit.txt",
    "pinned-docs.txt": "requirements/docs.txt",
    "pinned-kubernetes.txt": "requirements/kubernetes.txt",
}


@pytest.fixture(scope="module")
def pins() -> ModuleType:
    found = importlib.util.spec_from_file_location("pins", ROOT / "scripts" / "pins.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def lines(path: str) -> list[str]:
    """The lines of a list, without comments."""
    read = (line.partition("#")[0].strip() for line in (ROOT / path).read_text().splitlines())
    return [line for line in read if line]


@pytest.mark.parametrize("hashed", LISTS)
def test_every_version_has_its_hashes_after_make_pins(hashed: str) -> None:
    made = [line.partition(" --hash=")[0] for line in lines(f"requirements/{hashed}")]
    assert made == lines(LISTS[hashed]), f"run make pins: {LISTS[hashed]} has changed"


@pytest.mark.parametrize("hashed", [*LISTS, "pinned-app.txt"])
def test_a_line_is_a_version_and_hashes_and_names_no_index(hashed: str) -> None:
    line = r"[\w.-]+==[\w.]+(; python_\w+ [<>=]+ \"[\d.]+\")?( --hash=sha256:[0-9a-f]{64})+"
    for each in lines(f"requirements/{hashed}"):
        assert re.fullmatch(line, each), each[:80]


def test_all_that_the_project_needs_is_pinned(pins: ModuleType) -> None:
    pinned = {pins.name_of(line) for line in lines("requirements/pinned.txt")}
    assert pins.closure(pins.PROJECT, pins.HERE) - pinned == set()


@pytest.mark.skipif(
    f"celery=={version('celery')}" not in lines("constraints.txt"), reason="other versions need other packages"
)
def test_the_image_has_all_that_the_application_needs(pins: ModuleType) -> None:
    listed = lines("requirements/pinned-app.txt")
    wanted = pins.closure(pins.PROJECT, ["app"], pins.IMAGE_PYTHON) | {pins.BUILDS}
    assert {pins.name_of(line) for line in listed} == wanted
    assert set(listed) <= set(lines("requirements/pinned.txt"))


def test_what_installs_demands_hashes() -> None:
    for path in ("scripts/bootstrap", "scripts/with-versions", "Dockerfile", "Makefile"):
        text = (ROOT / path).read_text().replace("\\\n", " ")
        installs = [line for line in text.splitlines() if re.search(r"pip install", line)]
        assert any("--requirement" in line for line in installs), path
        # what `make bench` and `make ecosystem` add is pinned, and not compared
        compared = [line for line in installs if path != "Makefile" or "--constraint constraints.txt" not in line]
        assert all("--require-hashes" in line or "--no-deps" in line for line in compared), path
