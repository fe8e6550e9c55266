# `make` lists the targets. Each one prepares what it needs: system packages, .venv, servers.
#   PYTHON=python3.12         the interpreter for .venv
#   ARGS='-k outbox -x'       passed on to the tool behind the target
#   WORKERS=3                 test processes, each with servers of its own
#   PURCHASES= REFUNDS= COPIES=  options of the demo

STARTED := $(shell date +%s)
VENV := .venv/bin
# The sandbox's addresses for the processes below; set your own to use another provider or mail server.
export STRIPE_API_BASE ?= http://127.0.0.1:8420
export SMTP_URL ?= smtp://127.0.0.1:8425
# Where these processes count together; `make metrics` shows the sums.
worker relay beat metrics: export PROMETHEUS_MULTIPROC_DIR ?= $(CURDIR)/var/metrics
with_services = env="$$($(VENV)/python -m services env)" && eval "$$env" && exec

.DEFAULT_GOAL := help
.PHONY: check help venv up down status demo test faults chaos chaos-many controls search lint types sandbox worker relay beat flower doctor metrics bench profile clean migrate

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: .venv/ready ## make .venv (again only when pyproject.toml or constraints.txt changed)

.venv/ready: pyproject.toml constraints.txt
	@PYTHON='$(PYTHON)' scripts/bootstrap

up: .venv/ready ## start Postgres, Redis and RabbitMQ for development; their data is kept
	@$(VENV)/python -m services up

down: .venv/ready ## stop them
	@$(VENV)/python -m services down

status: .venv/ready ## show them
	@$(VENV)/python -m services status

demo: .venv/ready ## the whole system under load and faults, checked at the end
	@$(VENV)/python -m demo --started $(STARTED) $(if $(PURCHASES),--purchases $(PURCHASES)) \
		$(if $(REFUNDS),--refunds $(REFUNDS)) $(if $(COPIES),--copies $(COPIES)) $(ARGS)

test: .venv/ready ## all tests, against real servers
	@$(VENV)/python -m pytest --numprocesses $(or $(WORKERS),3) --dist loadfile $(ARGS)

chaos: .venv/ready ## random faults against the whole pipeline, checked at the end; SECONDS=60 SEED=1
	@$(VENV)/python -m tests.chaos --record --seconds $(or $(SECONDS),60) --seed $(or $(SEED),1) $(ARGS)

chaos-many: .venv/ready ## chaos with random seeds, one run after another, and a table of them; RUNS=10 SECONDS=300
	@$(VENV)/python -m tests.chaos.many --runs $(or $(RUNS),10) --seconds $(or $(SECONDS),300) $(ARGS)

controls: .venv/ready ## every safeguard removed once: its test must turn red
	@$(VENV)/python -m tests.controls $(ARGS)

search: .venv/ready ## schedules of every pair of actors, one by one; PREEMPTIONS=2 PAIRS=attempt+cancel SEEDS=1-500 JOBS=2; ALL=1: in every scenario
	@$(VENV)/python -m tests.search --preemptions $(or $(PREEMPTIONS),2) --jobs $(or $(JOBS),2) $(if $(ALL),,--fitting) \
		$(if $(PAIRS),--pairs $(PAIRS)) $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

faults: .venv/ready ## the fault matrix, kept in docs/faults.md; some of it with ARGS='-k F1-P2'
	@$(VENV)/python -m tests.faults $(ARGS)

check: .venv/ready ## what CI runs: all tests, lint and types
	@$(MAKE) --no-print-directory --keep-going test lint types

lint: .venv/ready ## ruff: rules and formatting
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .

types: .venv/ready ## mypy, strict
	@$(VENV)/mypy $(ARGS)

sandbox: .venv/ready ## the payment provider's sandbox and the mail sink
	@mkdir -p var/sandbox
	@exec $(VENV)/python -m sandbox all --provider-port 8420 --mail-port 8425 --data var/sandbox $(ARGS)

migrate: up ## bring the tables of the development database to this version
	@$(with_services) sh -c '$(VENV)/idempotency migrate && $(VENV)/python -m tasks.migrate'

worker: migrate ## a Celery worker
	@$(with_services) $(VENV)/celery -A tasks worker $(ARGS)

relay: migrate ## the relay from the outbox to the broker
	@$(with_services) $(VENV)/idempotency relay $(ARGS)

beat: migrate ## Celery beat
	@$(with_services) $(VENV)/celery -A tasks beat --schedule var/celerybeat-schedule $(ARGS)

flower: up ## Flower on 127.0.0.1:5555, for FLOWER_BASIC_AUTH=user:password or a password made up and shown
	@if [ -z "$$FLOWER_BASIC_AUTH" ]; then \
		export FLOWER_BASIC_AUTH="flower:$$($(VENV)/python -c 'import secrets; print(secrets.token_urlsafe(12))')"; \
		echo "http://127.0.0.1:5555  user and password $$FLOWER_BASIC_AUTH"; \
	fi; \
	$(with_services) $(VENV)/celery -A tasks flower --address=127.0.0.1 $(ARGS)

doctor: up ## what in the set-up would lose work or do it twice
	@$(with_services) $(VENV)/idempotency doctor $(ARGS)

metrics: migrate ## the backlog, and the counters of all workers, relays and beats, for Prometheus, on 127.0.0.1:9540
	@$(with_services) $(VENV)/idempotency metrics -A tasks $(ARGS)

bench: .venv/ready ## ours beside plain Celery; ONLY=unique,relay,latency,backlog,ordering,resend; ONLY=life: what is left of operations
	@$(VENV)/python -m benchmarks $(if $(ONLY),--only $(ONLY)) $(ARGS)

profile: .venv/ready ## round trips, CPU and time per phase of one attempt
	@$(VENV)/python -m benchmarks.profile $(ARGS)

clean: ## stop the servers; remove .venv, their data and all caches
	@if [ -x $(VENV)/python ]; then $(VENV)/python -m services down; fi
	rm -rf .venv var .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
