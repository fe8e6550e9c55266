"""Parameters for tests that show several cells of the fault matrix."""

from __future__ import annotations

from typing import Any

import pytest


def each(fault: str, *phases: str) -> list[Any]:
    """The cells of a fault at these phases, one parameter for each."""
    return [pytest.param(phase, marks=pytest.mark.cell(fault, phase), id=f"{fault}-{phase}") for phase in phases]
