"""Write monitoring/rules.yml as an object of the Prometheus operator: `make kubernetes`.

The rules are the same; only what starts a thing again is what starts it there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "monitoring" / "rules.yml"
TARGET = ROOT / "deploy" / "kubernetes" / "components" / "monitoring" / "rules.yaml"
_RESTART = "kubectl rollout restart"
# What a rule says under `start`, and what it is there. `{…}` of Prometheus' templates stay.
STARTS = {
    "idempotency metrics -A yourapp": f"{_RESTART} deployment/metrics",
    "celery -A yourapp worker": f"{_RESTART} deployment/worker",
    "idempotency relay -A yourapp": f"{_RESTART} deployment/relay",
    "systemctl start postgresql": "kubectl get cluster postgres",
    "systemctl start rabbitmq-server": "kubectl get rabbitmqcluster rabbitmq",
    '{{ if eq $labels.kind "relay" }}idempotency relay -A yourapp{{ else }}celery -A yourapp {{ $labels.kind }}{{ end }}': (
        "kubectl delete pod {{ $labels.host }}"
    ),
}
HEAD = "# Written by `make kubernetes` from monitoring/rules.yml, where changes belong.\n"


def rules() -> dict[str, Any]:
    """The object. Raises `KeyError` for a `start` that has no equal there."""
    groups = yaml.safe_load(SOURCE.read_text())["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        notes = rule["annotations"]
        if "start" in notes:
            notes["start"] = STARTS[notes["start"]]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "idempotency"},
        "spec": {"groups": groups},
    }


def main() -> None:
    TARGET.write_text(HEAD + yaml.safe_dump(rules(), sort_keys=False, width=120))
    sys.stdout.write(f"{TARGET.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
