"""Checks of Redis: its version, role, eviction of hints, and clock."""

from __future__ import annotations

import time

from pydantic import SecretStr
from redis import Redis

from ..tls import redis_options
from .clock import check_clock
from .findings import Finding, ok, warning
from .unreachable import TIMEOUT

# SET … KEEPTTL
OLDEST_REDIS = 6


def check_redis(url: SecretStr) -> list[Finding]:
    address = url.get_secret_value()
    with Redis.from_url(
        address,
        **redis_options(address),
        socket_timeout=TIMEOUT,
        socket_connect_timeout=TIMEOUT,
        decode_responses=True,
    ) as client:
        info = client.info()
        asked = time.time()
        seconds, microseconds = client.time()
        now = (asked + time.time()) / 2
    findings = []
    version, role, policy = info["redis_version"], info["role"], info.get("maxmemory_policy", "unknown")
    if int(version.partition(".")[0]) < OLDEST_REDIS:
        findings.append(
            warning("redis", f"version {version}, need at least {OLDEST_REDIS}", "hints need SET … KEEPTTL")
        )
    if role != "master":
        findings.append(warning("redis", f"role {role}, need master", "it refuses all hints; use the primary"))
    if policy != "noeviction":
        advice = "evicted hints mean more claims in Postgres"
        findings.append(warning("redis maxmemory-policy", f"{policy}, need noeviction", advice))
    findings = findings or [ok("redis", f"version {version}, {role}, {policy}")]
    return [*findings, check_clock("redis clock", seconds + microseconds / 1e6 - now)]
