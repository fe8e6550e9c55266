"""Each asserts the bad outcome."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from drill.runbook import DIRECTORY, commands

RULES = Path(__file__).parents[2] / "monitoring" / "rules.yml"
TEST = """
rule_files: [{rules}]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - {{series: 'idempotency_database_writable{{instance="shop:9540",job="idempotency"}}', values: 1x120}}
      - {{series: 'idempotency_database_writable{{instance="bank:9540",job="idempotency"}}', values: 1x120}}
      - {{series: 'idempotency_outbox_unpublished{{instance="shop:9540",job="idempotency"}}', values: 900x120}}
      - {{series: 'idempotency_last_sign_seconds{{kind="relay",name="r",host="h",pid="1",instance="bank:9540",job="idempotency"}}', values: 5x120}}
      - {{series: 'idempotency_last_sign_seconds{{kind="worker",name="w",host="h",pid="2",instance="bank:9540",job="idempotency"}}', values: 5x120}}
    alert_rule_test:
      - {{eval_time: 29m, alertname: NoRelay, exp_alerts: []}}
      - {{eval_time: 29m, alertname: NoRelayProcess, exp_alerts: []}}
      - {{eval_time: 29m, alertname: NoWorker, exp_alerts: []}}
"""


def test_a_relay_of_another_application_keeps_the_alert_silent(tmp_path: Path) -> None:
    """The shop has no relay and no worker at all, with 900 rows due for half an hour; the bank's are well, so nothing fires."""
    file = tmp_path / "test.yml"
    file.write_text(TEST.format(rules=RULES))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_runbook_of_a_silent_process_kills_whatever_has_its_number_now() -> None:
    """silent.md: `kill -KILL PID || true    # it hangs, or is gone already`: nothing looks at what that process is."""
    page = (DIRECTORY / "silent.md").read_text()
    line = next(each for each in commands(page) if "kill" in each.command)
    another = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        # the silent worker is gone; the machine has given its number to another process
        filled = line.filled({"PID": str(another.pid)})
        time.sleep(0.2)
        subprocess.run(["/bin/sh", "-c", filled], check=True)
        assert another.wait(5) == -9
    finally:
        another.kill()


def test_how_a_worker_is_started_again_is_no_word_of_a_shell(tmp_path: Path) -> None:
    """START is put into the page's command as it is; a worker's name or queue with a space or `;` in it is more than one word."""
    from types import SimpleNamespace

    from idempotency.upkeep.alarms import _start

    mark = tmp_path / "ran"
    process = SimpleNamespace(kind="worker", name=f"w@h$(touch {mark})", queues=["eu payments", "a;b"])
    start = _start(process)  # type: ignore[arg-type]
    line = next(each for each in commands((DIRECTORY / "silent.md").read_text()) if "START" in each.command)
    filled = line.filled({"START": start}).removesuffix("&").replace("celery -A", "true celery -A")
    subprocess.run(["/bin/sh", "-c", filled], check=False, capture_output=True)
    assert mark.exists()
    assert "--queues eu payments,a;b" in start
