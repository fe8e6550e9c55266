"""The settings: their defaults, and the combinations that cannot keep the promise."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from idempotency.application import settings_of
from idempotency.attempt.hints import Hint, Hints
from idempotency.checks.settings import read_settings
from idempotency.errors import SettingsError
from idempotency.settings import Settings
from idempotency.wire.keys import OperationId

HOUR = 3600.0
PASSWORD = "s3cret-Pa55"
URLS = {
    "database_url": f"postgresql+psycopg://app:{PASSWORD}@db.example:5432/app",
    "redis_url": f"redis://:{PASSWORD}@redis.example:6379/0",
}


def settings(**given: Any) -> Settings:
    app = Celery("settings", set_as_current=False)
    app.conf.update({f"idempotency_{name}": value for name, value in (URLS | given).items()})
    return settings_of(app)


def refusal(**given: Any) -> str:
    with pytest.raises(SettingsError) as refused:
        settings(**given)
    return str(refused.value)


def test_the_name_of_a_script_is_no_name_of_an_application() -> None:
    """`Celery(__name__)`: its workers import the same module under another name."""
    script = Celery("__main__", set_as_current=False)
    script.conf.idempotency_database_url = URLS["database_url"]
    with pytest.raises(SettingsError, match=r"idempotency_service: is '__main__'.*set it"):
        settings_of(script)
    script.conf.idempotency_service = "shop"
    assert settings_of(script).service == "shop"


def test_the_defaults_are_the_documented_ones() -> None:
    defaults = settings()
    assert (defaults.lease, defaults.heartbeat) == (60, 20)
    assert (defaults.sweep, defaults.wait) == (15, 30)
    assert defaults.max_attempts == 5
    assert (defaults.retry_base, defaults.retry_cap) == (1, 300)
    assert defaults.retention_completed == 72 * HOUR
    assert defaults.retention_failed == 30 * 24 * HOUR
    assert defaults.redelivery_horizon == 24 * HOUR
    assert defaults.defer_budget < defaults.provider_key_retention == 24 * HOUR
    assert defaults.max_run is None
    assert defaults.longest_run == 10 * defaults.lease
    assert defaults.tenant == "default"


def test_only_the_database_has_to_be_named() -> None:
    app = Celery("settings", set_as_current=False)
    with pytest.raises(SettingsError, match=r"^idempotency_database_url: Field required$"):
        settings_of(app)
    app.conf.idempotency_database_url = URLS["database_url"]
    assert settings_of(app).redis_url is None


# The twin that is accepted, the one that is refused, and the two values that the refusal names.
CROSS_CHECKS = [
    ({"heartbeat": 29.9, "lease": 60}, {"heartbeat": 30, "lease": 60}, ("heartbeat=30", "lease=60")),
    ({"retry_base": 300, "retry_cap": 300}, {"retry_base": 301, "retry_cap": 300}, ("retry_base", "301", "300")),
    (
        {"retention_completed": 48 * HOUR, "redelivery_horizon": 48 * HOUR},
        {"retention_completed": 47 * HOUR, "redelivery_horizon": 48 * HOUR},
        ("retention_completed=169200", "redelivery_horizon=172800"),
    ),
    (
        {"retention_failed": 24 * HOUR},
        {"retention_failed": 24 * HOUR - 1},
        ("retention_failed=86399", "redelivery_horizon=86400"),
    ),
    (
        {"defer_budget": 24 * HOUR - 1},
        {"defer_budget": 24 * HOUR},
        ("defer_budget=86400", "provider_key_retention=86400"),
    ),
    (
        {"sign_of_life": 20, "alarm_silence": 60},
        {"sign_of_life": 21, "alarm_silence": 60},
        ("alarm_silence=60", "sign_of_life=21"),
    ),
    (
        {"retention_processes": 61, "alarm_silence": 60},
        {"retention_processes": 60, "alarm_silence": 60},
        ("retention_processes=60", "alarm_silence=60"),
    ),
    (
        {"retention_http": 600},
        {"retention_http": 599},
        ("retention_http=599", "max_run=600"),
    ),
    ({"max_run": 60, "lease": 60}, {"max_run": 59, "lease": 60}, ("max_run=59", "lease=60")),
]


@pytest.mark.parametrize(("accepted", "refused", "named"), CROSS_CHECKS)
def test_settings_that_cannot_hold_together_are_refused_with_both_values(
    accepted: dict[str, Any], refused: dict[str, Any], named: tuple[str, ...]
) -> None:
    assert settings(**accepted)
    message = refusal(**refused)
    assert "\n" not in message
    for part in named:
        assert part in message


@pytest.mark.parametrize(
    ("name", "refused", "accepted"),
    [
        ("lease", 0, 45),
        ("lease", -1, 45),
        ("lease", "soon", "45"),
        ("lease", float("nan"), 45),
        ("heartbeat", 0, 0.1),
        ("max_run", 0, 600),
        ("sweep", 0, 1),
        ("wait", -0.1, 0),
        ("max_attempts", 0, 1),
        ("max_attempts", 2.5, 2),
        ("retry_base", -1, 0),
        ("retry_cap", -1, 1),
        ("defer_budget", 0, 1),
        ("retention_completed", 0, 72 * HOUR),
        ("retention_failed", None, 72 * HOUR),
        ("result_limit", 0, 1),
        ("arguments_limit", 0, 1),
        ("redis_timeout", 0, 0.05),
        ("redis_pause", -1, 0),
        ("pool_size", 0, 1),
        ("sign_of_life", 0, 1),
        ("alarm_silence", 0, 60),
        ("alarm_unconsumed", -1, 0),
        ("alarm_accepted", 0, 1),
        ("tenant", "", "acme"),
        ("tenant", "t" * 256, "t" * 255),
        ("database_url", None, URLS["database_url"]),
        ("redis_url", 6379, None),
        ("database_url", f"postgresql+psycopg://app@db:{PASSWORD}/app", URLS["database_url"]),
        ("database_url", PASSWORD, URLS["database_url"]),
        ("database_url", f"nosuch://app:{PASSWORD}@db/app", "postgresql+psycopg://app@db/app"),
        ("database_url", f"mysql://app:{PASSWORD}@db/app", "postgresql+psycopg://app@db/app"),
        ("redis_url", f"redis://cache:{PASSWORD}", "redis://cache"),
        ("redis_url", f"http://cache:{PASSWORD}", "rediss://cache:6379/1"),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_line_naming_the_setting(
    name: str, refused: object, accepted: object
) -> None:
    assert settings(**{name: accepted})
    message = refusal(**{name: refused})
    assert message.startswith(f"idempotency_{name}: ")
    assert "\n" not in message


@pytest.mark.parametrize("name", ["lease", "retention_completed", "retention_failed"])
def test_a_duration_without_end_is_refused(name: str) -> None:
    # Postgres has no interval of that length: every claim or finish would fail instead
    assert f"idempotency_{name}" in refusal(**{name: float("inf")})


def test_an_unknown_setting_is_refused_by_its_name() -> None:
    assert refusal(leese=30) == "idempotency_leese: no such setting; did you mean idempotency_lease?"
    assert refusal(zzz=30) == "idempotency_zzz: no such setting"


def test_settings_of_others_are_left_alone() -> None:
    app = Celery("settings", set_as_current=False)
    app.conf.update(idempotency_database_url=URLS["database_url"], task_acks_late=True, idempotence_lease=1)
    assert settings_of(app).lease == 60


def test_every_problem_has_its_line() -> None:
    lines = refusal(lease=0, max_attempts=0, leese=30).splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == [
        "idempotency_lease",
        "idempotency_leese",
        "idempotency_max_attempts",
    ]


@pytest.mark.parametrize(
    "given",
    [refused for _, refused, _ in CROSS_CHECKS]
    + [
        {"database_url": f"postgresql+psycopg://app@db.example:{PASSWORD}/app"},
        {"database_url": PASSWORD},
        {"redis_url": f"redis://cache.example:{PASSWORD}"},
        {"lease": PASSWORD},
        {"leese": PASSWORD},
        {"database_url": [URLS["database_url"]]},
        {"redis_url": {"u": PASSWORD}},
    ],
)
def test_no_refusal_shows_an_address_or_a_password(given: dict[str, Any]) -> None:
    message = refusal(**given)
    assert PASSWORD not in message
    assert "example" not in message
    assert "://" not in message


@pytest.mark.parametrize(
    "address",
    [
        f"redis://:{PASSWORD}@a..b:6379/0",
        f"redis://:{PASSWORD}@{'x' * 64}.example/0",
        f"redis://:{PASSWORD}@cache.example:6379/0?foo={PASSWORD}",
        f"rediss://:{PASSWORD}@cache.example:6379/0?ssl_cert_req=none",
        f"redis://:{PASSWORD}@cache.example:6379/0?protocol=4",
        f"redis://:{PASSWORD}@cache.example:6379/0?cache_config=1",
        f"rediss://:{PASSWORD}@cache.example:6379/0?ssl_cert_reqs={PASSWORD}",
        f"sentinels://:{PASSWORD}@s1.example:26379/hints?ssl_cert_reqs={PASSWORD}",
        f"sentinel://:{PASSWORD}@a..b:26379/hints",
        f"sentinels://:{PASSWORD}@s1.example:26379/hints?ssl_foo=1",
    ],
)
def test_what_redis_py_would_refuse_at_each_claim_is_refused_at_the_start(address: str) -> None:
    message = refusal(redis_url=address)
    assert message.startswith("idempotency_redis_url: ")
    assert PASSWORD not in message
    assert "example" not in message


@pytest.mark.parametrize("option", ["foo=1", "retry=3", "command_packer=x", "encoding=nonsense"])
def test_hints_cost_no_claim_whatever_redis_py_says_of_their_address(option: str) -> None:
    hints = Hints(f"redis://127.0.0.1:1/0?{option}", owner="o", lease=60, timeout=0.1, pause=5)
    assert hints.take(OperationId("default", "task", "k"), "a" * 32, "v1:00") is Hint.FREE


@pytest.mark.parametrize("option", ["read_from_replicas=True", "reinitialize_steps=5"])
def test_a_store_in_a_cluster_may_have_options_that_a_connection_has_not(option: str) -> None:
    address = f"redis+cluster://h:7000?{option}"
    store = settings(store=address).store
    assert store is not None
    assert store.get_secret_value() == address


@pytest.mark.parametrize(
    ("address", "owner"),
    [
        ("postgresql+psycopg://u@db/shop", "db:None/shop app"),
        ("postgresql+psycopg:///shop?host=/var/run/postgresql", "/var/run/postgresql:None/shop app"),
        ("postgresql+psycopg://u@db:5432/shop", "db:5432/shop app"),
        (
            "postgresql+psycopg:///shop?host=two:5432&host=one:5432&target_session_attrs=primary",
            "one:5432,two:5432/shop app",
        ),
    ],
)
def test_whose_hints_are_is_said_by_the_address_alone(
    address: str, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGHOSTADDR", "10.0.0.5")
    monkeypatch.setenv("PGPORT", "6432")
    assert settings(database_url=address, service="app").owner == owner


def test_the_settings_themselves_show_no_address() -> None:
    for text in (repr(settings()), str(settings()), settings().model_dump_json()):
        assert PASSWORD not in text
        assert "example" not in text


def test_settings_do_not_change_once_read() -> None:
    with pytest.raises(ValueError, match="frozen"):
        settings().lease = 1


@pytest.mark.parametrize(
    ("url", "is_accepted"),
    [
        ("https://hooks.example/services/x", True),
        ("http://127.0.0.1:8080/x", True),
        ("http://localhost/x", True),
        ("http://hooks.example/services/x", False),
        ("http://127.0.0.1.example/x", False),
        ("ftp://127.0.0.1/x", False),
        ("http://[::1", False),
    ],
)
def test_alerts_leave_the_machine_over_tls_only(url: str, is_accepted: bool) -> None:
    given = {"database_url": "postgresql+psycopg://localhost/x", "alert_webhook_url": url}
    if is_accepted:
        assert Settings.read(given).alert_webhook_url is not None
        return
    with pytest.raises(SettingsError) as refused:
        Settings.read(given)
    assert "services" not in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "large_results_at",
        "store_results_at",
        "session",
        "engine",
        "cell_of",
        "traces",
        "oidc_issuer",
        "web_url",
        "plain_text_hosts",
    ],
)
@pytest.mark.parametrize("value", ["http://u:S3CRET@h.example/x", "s3://AKIA123:S3CRET@bucket/prefix", "u:S3CRET@h"])
def test_a_value_that_may_be_an_address_is_shown_by_no_refusal(name: str, value: str) -> None:
    app = Celery("shown", set_as_current=False)
    app.conf.update({"idempotency_database_url": "postgresql+psycopg://h/x", f"idempotency_{name}": value})
    settings, findings = read_settings(app)
    assert settings is None
    assert findings
    assert "S3CRET" not in " ".join(map(str, findings))


def test_a_name_that_leads_nowhere_is_refused_with_why() -> None:
    with pytest.raises(SettingsError, match=r"idempotency_engine: .*No module named 'not_there'"):
        Settings.read({"database_url": "postgresql+psycopg://h/x", "engine": "not_there:engine"})
