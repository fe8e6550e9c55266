"""The servers of `services`: started, crashed, paused, given, and gone afterwards."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import amqp
import psutil
import psycopg
import pytest
from redis import Redis as RedisClient
from redis.exceptions import AuthenticationError

import services
from services import packages
from services.__main__ import _public
from services.postgres import create_database
from services.redis import RedisBroker

ROOT = Path(__file__).parents[2]
ADDRESSES = ("DATABASE_URL", "REDIS_URL", "BROKER_URL")

needs_rabbitmq = pytest.mark.skipif(
    packages.rabbitmq_program() is None, reason="RabbitMQ is not installed on this machine"
)


@pytest.fixture(autouse=True)
def no_given_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ADDRESSES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def light() -> Iterator[services.Services]:
    """Postgres and Redis, which start in well under a second."""
    with services.running(needs=["postgres", "redis"]) as s:
        yield s


def query(url: str, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True, connect_timeout=5) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def becomes_true(condition: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def processes_below(directory: Path) -> list[str]:
    """Whatever still runs with this directory in its command line or as its working directory."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "cwd", "status"]):
        words = [*(process.info["cmdline"] or []), process.info["cwd"] or ""]
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(directory) in word for word in words):
            found.append(f"{process.info['pid']} {words[0]}")
    return found


@pytest.mark.long
def test_the_three_servers_answer_and_nothing_is_left_afterwards() -> None:
    with services.running() as s:
        assert query(s.database_url, "SELECT 1") == [(1,)]
        with RedisClient.from_url(s.redis_url) as client:
            assert client.ping()
        if s.broker == "rabbitmq":
            with amqp.Connection(f"127.0.0.1:{s.rabbitmq.port}", userid="services", password=s.rabbitmq.password):
                pass
        family = [psutil.Process(server.pid) for server in s.servers.values()]
        family += [child for process in family for child in process.children(recursive=True)]
        assert s.environment() == {
            "DATABASE_URL": s.database_url,
            "REDIS_URL": s.redis_url,
            "BROKER_URL": s.broker_url,
        }
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not processes_below(s.directory)
    assert not s.directory.exists()


@pytest.mark.long
def test_everything_listens_on_the_loopback_interface_only() -> None:
    with services.running() as s:
        listening = [
            connection.laddr.ip
            for server in s.servers.values()
            for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ]
    assert set(listening) == {"127.0.0.1"}


@pytest.mark.long
def test_postgres_runs_with_the_durability_of_production(light: services.Services) -> None:
    settings = ("fsync", "synchronous_commit", "full_page_writes", "max_connections", "transaction_isolation")
    values = [query(light.database_url, f"SHOW {name}")[0][0] for name in settings]
    assert values == ["on", "on", "on", "200", "read committed"]


@pytest.mark.long
def test_postgres_and_redis_refuse_a_wrong_password(light: services.Services) -> None:
    wrong_database = light.database_url.replace(light.postgres.password, "wrong")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        query(wrong_database, "SELECT 1")
    client = RedisClient(host="127.0.0.1", port=light.redis.port, password="wrong", retry=None)  # type: ignore[arg-type]
    with client, pytest.raises(AuthenticationError):
        client.ping()


@pytest.mark.long
def test_postgres_keeps_its_port_and_what_was_committed_across_a_kill(light: services.Services) -> None:
    url = light.create_database("kept")
    query(url, "CREATE TABLE things AS SELECT 42 AS thing")
    port, pid = light.postgres.port, light.postgres.pid
    light.postgres.kill()
    assert not light.postgres.running
    with pytest.raises(psycopg.OperationalError):
        query(url, "SELECT 1")
    light.postgres.start()
    assert (light.postgres.port, query(url, "SELECT thing FROM things")) == (port, [(42,)])
    assert light.postgres.pid != pid


@pytest.mark.long
def test_a_databases_nearest_address_is_its_socket_and_leads_to_the_same(light: services.Services) -> None:
    url = light.create_database("near")
    query(url, "CREATE TABLE things AS SELECT 42 AS thing")
    nearest = light.postgres.nearest_url("near")
    assert query(nearest, "SELECT thing, inet_server_addr() FROM things") == [(42, None)]


@pytest.mark.long
def test_redis_comes_back_empty_on_the_same_port_after_a_kill(light: services.Services) -> None:
    with RedisClient.from_url(light.redis_url) as client:
        client.set("lease", "token")
    light.redis.kill()
    light.redis.start()
    with RedisClient.from_url(light.redis_url) as client:
        assert client.get("lease") is None


@needs_rabbitmq
@pytest.mark.long
def test_rabbitmq_keeps_vhosts_queues_and_messages_across_a_kill() -> None:
    with services.running(needs=["rabbitmq"]) as s:
        assert s.create_vhost("orders/1").endswith("/orders%2F1")
        login = {"userid": "services", "password": s.rabbitmq.password, "virtual_host": "orders/1"}
        with amqp.Connection(f"127.0.0.1:{s.rabbitmq.port}", confirm_publish=True, **login) as connection:
            channel = connection.channel()
            channel.queue_declare("q", durable=True, auto_delete=False, arguments={"x-queue-type": "quorum"})
            channel.basic_publish(amqp.Message(b"kept", delivery_mode=2), routing_key="q", mandatory=True)
        # RabbitMQ 3.10 writes the list of its quorum queues behind: one declared in the last half second before a
        # crash comes back without a leader.
        names = s.rabbitmq.directory / "data" / "quorum" / "services@localhost" / "names.dets"
        if names.exists():
            assert becomes_true(lambda: b"orders/1_q" in names.read_bytes())
        s.rabbitmq.kill()
        s.rabbitmq.start()
        with amqp.Connection(f"127.0.0.1:{s.rabbitmq.port}", **login) as connection:
            channel = connection.channel()
            assert becomes_true(lambda: channel.queue_declare("q", passive=True).message_count == 1)
            message = channel.basic_get("q", no_ack=True)
            assert message is not None
            assert message.body in (b"kept", "kept")
        assert set(s.rabbitmq.queue_lengths("orders/1")) == {"q"}
        s.delete_vhost("orders/1")
        with pytest.raises(services.ServiceError, match="404"):
            s.rabbitmq.queue_lengths("orders/1")
        epmd = psutil.Process(int((s.directory / "rabbitmq" / "epmd.pid").read_text().split()[0]))
    assert not epmd.is_running() or epmd.status() == psutil.STATUS_ZOMBIE


@pytest.mark.long
@pytest.mark.parametrize("name", ["postgres", "redis", pytest.param("rabbitmq", marks=needs_rabbitmq)])
def test_a_paused_server_is_silent_until_it_is_resumed(name: str) -> None:
    with services.running(needs=[name]) as s:
        server = s.servers[name]
        server.pause()
        stopped = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        # A session that has just ended stays a zombie for as long as its stopped parent cannot notice.
        quiet = {psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE}
        assert becomes_true(lambda: {process.status() for process in stopped} <= quiet)
        assert stopped[0].status() == psutil.STATUS_STOPPED
        assert server.running
        if name != "rabbitmq":  # its check waits half a minute for an answer
            assert not server.answers()
        server.resume()
        server.wait_until_ready()


@pytest.mark.long
def test_a_paused_server_can_be_stopped_and_started_again(light: services.Services) -> None:
    light.postgres.pause()
    light.postgres.stop()
    assert not light.postgres.running
    light.postgres.start()
    assert light.postgres.answers()


@pytest.mark.long
def test_restart_shuts_down_in_order_and_starts_another_process(light: services.Services) -> None:
    pid = light.postgres.pid
    light.postgres.restart()
    assert light.postgres.pid != pid
    assert "received fast shutdown request" in light.postgres.log.read_text()


@pytest.mark.long
def test_an_address_in_the_environment_is_used_as_it_is(
    light: services.Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**light.environment(), "BROKER_URL": "amqp://guest:guest@broker.example:5672//"}
    for variable, address in given.items():
        monkeypatch.setenv(variable, address)
    with services.running() as s:
        assert s.environment() == given
        assert (s.broker, s.servers) == ("given", {})
        query(s.create_database("elsewhere"), "SELECT 1")
        with pytest.raises(services.ServiceError, match="DATABASE_URL is set"):
            s.postgres.kill()
    assert light.postgres.answers()
    assert light.redis.answers()


@pytest.mark.long
def test_two_sets_of_servers_run_side_by_side() -> None:
    with services.running() as one, services.running() as two:
        ports = [port for s in (one, two) for server in s.servers.values() for port in server.ports.values()]
        assert len(set(ports)) == len(ports)
        query(one.create_database("only_here"), "SELECT 1")
        names = {row[0] for row in query(two.database_url, "SELECT datname FROM pg_database")}
        assert "only_here" not in names
    assert not processes_below(one.directory)
    assert not processes_below(two.directory)


@pytest.mark.long
def test_without_rabbitmq_a_second_redis_is_the_broker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "RABBITMQ_PROGRAMS", ())
    monkeypatch.setattr(packages, "can_install", lambda: False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    with services.running(needs=["redis", "rabbitmq"]) as s:
        assert s.broker == "redis"
        assert s.broker_url.startswith("redis://")
        assert s.broker_url != s.redis_url
        assert isinstance(s.servers["rabbitmq"], RedisBroker)
        with pytest.raises(services.ServiceError, match="rabbitmq was not started here"):
            s.rabbitmq.kill()
    assert "using a second Redis as the broker" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("paused", [False, True])
def test_the_servers_end_when_their_owner_is_killed(paused: bool) -> None:
    program = (
        "import services, signal\n"
        "with services.running(needs=['postgres', 'redis']) as s:\n"
        f"    if {paused}: s.postgres.pause()\n"
        "    print(s.directory, flush=True)\n"
        "    signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        directory = Path(owner.stdout.readline().strip())
        assert (directory / "postgres" / "data").is_dir()
        owner.send_signal(signal.SIGKILL)
    assert becomes_true(lambda: not directory.exists() and not processes_below(directory))


@pytest.mark.long
def test_a_server_that_cannot_start_says_why_without_its_password(tmp_path: Path) -> None:
    server = services.Redis(tmp_path)
    squatter = services.Redis(tmp_path / "squatter")
    squatter.ports = server.ports
    squatter.start()
    try:
        with pytest.raises(services.ServiceError, match="Address already in use") as caught:
            server.start()
    finally:
        squatter.discard()
    assert server.password not in str(caught.value)


@pytest.mark.long
def test_a_directory_keeps_data_and_password_but_not_a_taken_port(tmp_path: Path) -> None:
    with services.running(tmp_path, needs=["postgres"]) as s:
        query(s.create_database("kept"), "CREATE TABLE things ()")
        first = s.postgres.port
    squatter = services.Redis(tmp_path / "squatter")
    squatter.ports = {"main": first}
    squatter.start()
    try:
        with services.running(tmp_path, needs=["postgres"]) as s:
            assert s.postgres.port != first
            query(s.postgres.database_url("kept"), "SELECT FROM things")
    finally:
        squatter.discard()
    assert not processes_below(tmp_path)


@pytest.mark.long
def test_a_long_directory_name_does_not_stop_postgres(tmp_path: Path) -> None:
    with services.running(tmp_path / ("d" * 100), needs=["postgres"]) as s:
        assert query(s.database_url, "SELECT 1") == [(1,)]


@pytest.mark.long
def test_unknown_services_and_malformed_database_names_are_refused_by_name(light: services.Services) -> None:
    with pytest.raises(ValueError, match="unknown service 'mysql'"), services.running(needs=["mysql"]):
        pass
    with pytest.raises(ValueError, match="at most 63 characters"):
        light.create_database("a" * 64)
    with pytest.raises(ValueError, match="database name"):
        create_database(light.database_url, 'x"; DROP DATABASE postgres')
    query(light.create_database("a" * 63), "SELECT 1")
    light.drop_database("a" * 63)
    light.drop_database("a" * 63)


def test_a_pid_that_belongs_to_another_process_by_now_is_left_alone(tmp_path: Path) -> None:
    server = services.Redis(tmp_path)
    fields = Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()
    fields[19] = str(int(fields[19]) - 1)
    (tmp_path / "pid").write_text(f"{os.getpid()} (sh) {' '.join(fields)}\n")
    assert not server.running
    server.stop()
    server.kill()


@pytest.mark.long
def test_the_command_line_starts_once_shows_and_stops(tmp_path: Path) -> None:
    # The broker is given, so that this takes a second; the state lies in a copy of the package's place.
    (tmp_path / "services").symlink_to(ROOT / "services")
    environment = {**os.environ, "BROKER_URL": "amqp://user:hidden@broker.example//", "PYTHONPATH": str(tmp_path)}
    state = f"import services.__main__ as m; m.STATE = m.Path({str(tmp_path / 'state')!r}); m.sys.exit(m.main())"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", state, *arguments]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert "make up" in run("env").stderr
    try:
        assert "running: postgres, redis" in run("up").stdout
        before = json.loads(run("status", "--json").stdout)
        assert run("up").returncode == 0
        assert json.loads(run("status", "--json").stdout) == before
        assert [row["state"] for row in before] == ["running", "running", "given"]
        assert "hidden" not in str(before)
        exported = run("env").stdout
        assert all(f"export {variable}=" in exported for variable in ADDRESSES)
        # in a shell that has taken them
        environment |= dict(shlex.split(line)[1].split("=", 1) for line in exported.splitlines())
        assert json.loads(run("status", "--json").stdout) == before
        assert run("env").stdout == exported
    finally:
        assert "stopped: postgres, redis" in run("down").stdout
    assert "nothing was running" in run("down").stdout
    assert not processes_below(tmp_path)


def test_an_address_is_shown_without_user_password_and_options() -> None:
    assert _public("postgresql+psycopg://u:p@h:1/d?password=p") == "postgresql+psycopg://h:1/d"
