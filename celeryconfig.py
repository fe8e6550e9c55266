"""Celery's configuration, and the only place where the application reads the environment."""

from __future__ import annotations

import os
from datetime import timedelta

from kombu import Queue
from pydantic import FilePath, SecretStr
from pydantic_settings import BaseSettings

from idempotency.queues import EXCHANGE, quorum_queue
from idempotency.setting_values import WebAddress
from idempotency.settings import PREFIX, Settings


class Environment(BaseSettings):
    """Addresses and credentials. An error names the variable and never shows its value."""

    model_config = {"hide_input_in_errors": True}

    database_url: SecretStr
    redis_url: SecretStr | None = None
    broker_url: SecretStr
    # Of the authority that has signed the broker's certificate, for amqps:// or rediss://; by default, the system's.
    broker_ca_file: FilePath | None = None
    # With it, who may publish to the broker can also stop workers and revoke tasks. Flower's pages about workers need it.
    remote_control: bool = False
    # Only with Redis as the broker, which redelivers an unacknowledged message after this many seconds. Must exceed the
    # hard time limit below; a killed worker's messages come back no sooner.
    broker_visibility_timeout: int = 100
    stripe_api_key: SecretStr = SecretStr("sk_test_sandbox")
    stripe_api_base: WebAddress = "https://api.stripe.com"
    # Seconds until search finds a new charge. Stripe: under a minute in normal operation
    # (docs.stripe.com/search#data-freshness).
    stripe_search_lag: float = 60.0
    # Seconds without an answer after which a call's outcome counts as unknown.
    stripe_timeout: float = 10.0
    # Seconds until a charge that is not decided is asked about, if no webhook comes before.
    stripe_first_poll: float = 5.0
    # The secrets of the webhooks that providers send, new ones first, separated by commas. Without one, none is accepted.
    stripe_webhook_secrets: SecretStr = SecretStr("")
    payment_webhook_secrets: SecretStr = SecretStr("")
    # smtps://user:password@host, or smtp://, which means STARTTLS off this machine.
    smtp_url: SecretStr = SecretStr("smtp://127.0.0.1:25")
    mail_from: str = "payments@shop.example"
    carrier_url: WebAddress = "http://127.0.0.1:8430"
    # Seconds, as `stripe_timeout`.
    carrier_timeout: float = 10.0
    # How long a return waits for the carrier, and then for the warehouse. In seconds, or as ISO 8601 has it: P5D.
    pickup_within: timedelta = timedelta(days=5)
    inspection_within: timedelta = timedelta(days=14)


environment = Environment()

# ---------------------------------------------------------------- the broker

broker_url = environment.broker_url.get_secret_value()
broker_connection_retry_on_startup = True
broker_channel_error_retry = True
# Notices a dead peer within half a minute; Celery's default takes four.
broker_heartbeat = 15
broker_transport_options: dict[str, object] = {"confirm_publish": True}
# Kombu puts the host of the address in the place of None. Without it, a certificate for any host would do.
broker_use_ssl: dict[str, object] | None = None
_ca_file = environment.broker_ca_file and str(environment.broker_ca_file)
if broker_url.startswith("amqps:"):
    broker_use_ssl = {"server_hostname": None, "ca_certs": _ca_file}
elif broker_url.startswith("rediss:"):
    broker_use_ssl = {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": _ca_file}
if not broker_url.startswith("amqp"):
    broker_transport_options = {"visibility_timeout": environment.broker_visibility_timeout}

task_queues: list[Queue] = [
    quorum_queue(name) for name in ("payments", "refunds", "orders", "notifications", "webhooks", "maintenance")
]
task_default_queue = "payments"
task_default_exchange = EXCHANGE
task_default_exchange_type = "topic"  # native delayed delivery needs it
task_default_queue_type = "quorum"
task_default_routing_key = "payments"
task_create_missing_queues = False  # they would be classic queues without a delivery limit
task_routes = {
    "payments.*": {"queue": "payments"},
    "refunds.*": {"queue": "refunds"},
    "orders.*": {"queue": "orders"},
    "warehouse.*": {"queue": "orders"},
    "returns.*": {"queue": "orders"},
    "shipping.*": {"queue": "orders"},
    "observer.*": {"queue": "orders"},
    "notifications.*": {"queue": "notifications"},
    "support.*": {"queue": "notifications"},
    "webhooks.*": {"queue": "webhooks"},  # customers' servers may be slow
    "maintenance.*": {"queue": "maintenance"},
}

# ---------------------------------------------------------------- acknowledgement: a worker that dies loses nothing

task_acks_late = True
task_reject_on_worker_lost = True
task_retry_on_worker_lost = False  # would acknowledge without a dead letter
task_acks_on_failure = True  # IdempotentTask raises only after the record says failed
task_acks_on_timeout = False  # a time-out before the claim must not acknowledge
worker_prefetch_multiplier = 1
worker_enable_prefetch_count_reduction = False
worker_cancel_long_running_tasks_on_connection_loss = True
worker_soft_shutdown_timeout = 30.0
worker_enable_soft_shutdown_on_idle = True
worker_deduplicate_successful_tasks = False  # looks like protection but gives none
task_soft_time_limit, task_time_limit = 60, 90

task_serializer = result_serializer = "json"
accept_content = ["json"]
# Results are in Postgres; a result backend may be used as well.
task_ignore_result = True
worker_enable_remote_control = environment.remote_control
# Each event costs a confirmed message. A worker's option -E turns them on, and so does Flower with remote control.
task_send_sent_event = worker_send_task_events = False
timezone = "UTC"

# ---------------------------------------------------------------- idempotency

# Every setting in idempotency.settings can be given as IDEMPOTENCY_<NAME>.
for _name in Settings.model_fields:
    if (_value := os.environ.get(f"{PREFIX}{_name}".upper())) is not None:
        globals()[PREFIX + _name] = _value
idempotency_database_url = environment.database_url
idempotency_redis_url = environment.redis_url

# Which rows of ours the page of `idempotency web` shows beside an operation.
idempotency_business_rows = "tasks.ledger:rows_of"
# The reasons of this application's own that have a page in docs/runbooks.
idempotency_own_runbooks = (
    "card_declined", "carrier_refused", "charge_of_another", "charged_twice", "exceeds_captured", "invalid_recipient",
    "invalid_request", "invalid_subject", "ledger_differs", "minor_unit", "not_reserved", "payment_taken", "payment_unknown",
    "payment_", "refund_not_there", "refund_of_another", "refund_reversed", "refund_unknown", "refunded_twice",
    "return_closed", "return_unknown", "smtp_", "verdict_unknown",
)  # fmt: skip

_sweep = float(globals().get("idempotency_sweep", Settings.model_fields["sweep"].default))
beat_schedule = {
    # A tick may expire: the next one does its work.
    "recover": {"task": "maintenance.recover", "schedule": _sweep, "options": {"expires": _sweep}},
    "resend": {"task": "maintenance.resend", "schedule": _sweep, "options": {"expires": _sweep}},
    "purge": {"task": "maintenance.purge", "schedule": 600.0, "options": {"expires": 600.0}},
    "reconcile": {"task": "maintenance.reconcile_provider", "schedule": 86400.0, "options": {"expires": 86400.0}},
    "alert": {"task": "maintenance.alert", "schedule": _sweep, "options": {"expires": _sweep}},
    # Checked every hour, sent once a week, so that it is late rather than missing if beat was down.
    "report": {"task": "maintenance.report", "schedule": 3600.0, "options": {"expires": 3600.0}},
}
