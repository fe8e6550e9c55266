"""The tutorial, word by word: what it says to save is saved, what it says to type is typed, and what it prints is compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import services
from tests.support import shell
from tests.support.documents import every_block

PAGE = "docs/tutorial.md"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_tutorial_does_what_it_says(servers: services.Services, tmp_path: Path) -> None:
    blocks = [block for block in every_block(PAGE) if block.not_run is None]
    (application,) = [block for block in blocks if block.language == "python"]
    (tmp_path / "shop.py").write_text(application.text)
    with shell.opened(servers, tmp_path, ("tutorial", "tutorial.dead_letters")) as opened:
        compared = shell.type_out(opened, blocks, tmp_path / "stderr")
    assert compared == len([block for block in blocks if block.language == "text"])
    assert re.search(r"Traceback", (tmp_path / "relay.log").read_text()) is None
