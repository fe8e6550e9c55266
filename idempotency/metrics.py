"""What operators count: prometheus counters, by operation, never by key.

Flower shows a task that ran twice as one success; these show it as it was. Prefork workers share them through
`PROMETHEUS_MULTIPROC_DIR` (prometheus-client's multiprocess mode).
"""

from prometheus_client import Counter, Histogram

claims = Counter("idempotency_claims", "Attempts begun", ["operation"])
takeovers = Counter(
    "idempotency_takeovers", "Attempts begun after another one (retry, recovery, lease over)", ["operation"]
)
completed = Counter("idempotency_completed", "Operations completed", ["operation"])
failed = Counter("idempotency_failed", "Operations failed", ["operation", "code"])
retries = Counter("idempotency_retries", "Attempts released for another one", ["operation"])
deferrals = Counter("idempotency_deferrals", "Attempts given back: not the operation's fault", ["operation"])
duplicates = Counter("idempotency_duplicates", "Deliveries answered with the stored outcome", ["operation"])
busy = Counter("idempotency_busy", "Deliveries acknowledged while the operation was in flight", ["operation"])
mismatches = Counter("idempotency_mismatches", "Deliveries refused for their fingerprint", ["operation"])
fenced = Counter("idempotency_fenced_writes", "Writes of a former holder that matched nothing", ["operation"])
in_doubt = Counter("idempotency_commits_in_doubt", "Commits whose answer was lost", ["operation"])
leases_lost = Counter("idempotency_leases_lost", "Leases lost while the body ran", ["operation"])
unknown_effects = Counter("idempotency_unknown_effects", "Effects found begun without a result", ["operation"])
recovered = Counter("idempotency_recovered", "Orphaned operations released by recovery", ["cause"])
purged = Counter("idempotency_purged", "Records deleted past retention")
published = Counter("idempotency_outbox_published", "Outbox rows confirmed by the broker")
publish_errors = Counter("idempotency_outbox_errors", "Outbox rows whose publish failed", ["error"])
redis_unavailable = Counter("idempotency_redis_unavailable", "Calls to Redis that failed or timed out")
attempt_seconds = Histogram("idempotency_attempt_seconds", "From claim to commit", ["operation"])
