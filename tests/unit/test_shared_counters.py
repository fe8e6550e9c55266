"""What processes count in files that they share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from idempotency.observe import metrics


@pytest.mark.parametrize("left", ["counter_1.db", "gauge_livesum_1.db", "histogram_1.db"])
def test_the_empty_file_of_a_process_that_was_killed_hides_no_other(tmp_path: Path, left: str) -> None:
    (tmp_path / left).touch()
    assert metrics.totals(tmp_path) == {}
    counting = "from idempotency.observe import metrics; metrics.published.inc(3)"
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", counting], env=environment, check=True)
    assert metrics.totals(tmp_path)["idempotency_outbox_published_total"] == 3
