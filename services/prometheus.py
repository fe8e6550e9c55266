"""A Prometheus server that scrapes one endpoint and evaluates rules, every half second or so."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from services import packages
from services.server import Server, ServiceError

# Seconds: for an answer on loopback.
_TIMEOUT = 5.0


class Prometheus(Server):
    """Prometheus on loopback, without a password.

    `target`: what to scrape, `host:port`. `alertmanagers`: where alerts are posted, likewise. `interval`: between two scrapes
    and two evaluations, in milliseconds.
    """

    name = "prometheus"
    stop_signal = signal.SIGTERM

    def __init__(
        self,
        directory: Path,
        *,
        rules: str,
        target: str,
        alertmanagers: Sequence[str] = (),
        external_labels: Mapping[str, str] | None = None,
        interval: int = 500,
    ) -> None:
        super().__init__(directory)
        self._rules = rules
        every = f"{interval}ms"
        self._config: dict[str, Any] = {
            "global": {
                "scrape_interval": every,
                "scrape_timeout": every,
                "evaluation_interval": every,
                "external_labels": dict(external_labels or {}),
            },
            "rule_files": ["rules.yml"],
            # a scrape of a server that does not answer takes some seconds
            "scrape_configs": [
                {"job_name": "idempotency", "static_configs": [{"targets": [target]}]}
                | {"scrape_interval": every, "scrape_timeout": every}
            ],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": list(alertmanagers)}]}]},
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an expression gives now: `metric` (labels) and `value` of each series. Raises `URLError`."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """The rules as Prometheus sees them: `name`, `health`, `lastError`, `state`, `alerts`."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def firing(self) -> dict[str, list[dict[str, Any]]]:
        """The alerts that fire now, by name: their `labels` and `annotations`."""
        found: dict[str, list[dict[str, Any]]] = {}
        for alert in self._get("alerts")["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert)
        return found

    def _get(self, what: str, **given: str) -> Any:
        with urlopen(f"{self.url}/api/v1/{what}?{urlencode(given)}", timeout=_TIMEOUT) as answer:  # noqa: S310
            return json.load(answer)["data"]

    def _command(self) -> Sequence[str | Path]:
        program = packages.prometheus_program()
        if program is None:
            raise ServiceError("Prometheus not found: install the package prometheus")
        (self.directory / "rules.yml").write_text(self._rules)
        # JSON is YAML
        config = self.directory / "prometheus.yml"
        config.write_text(json.dumps(self._config))
        return [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={self.directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]

    def _check(self) -> None:
        with urlopen(f"{self.url}/-/ready", timeout=_TIMEOUT) as answer:  # noqa: S310
            if answer.status != 200:
                raise URLError(f"{answer.status}")
