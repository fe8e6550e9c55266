# `make` lists the targets. Each one sets up what it needs: system packages, .venv, servers.
#   PYTHON=python3.12         the interpreter for .venv
#   ARGS='-k outbox -x'       passed to the tool behind the target
#   WORKERS=4                 test processes, each with its own servers
#   PARTITIONED=day           the records of the tests' databases are in partitions
#   POOLER=1                  the tests' applications reach Postgres through PgBouncer in transaction mode
#   PURCHASES= REFUNDS= COPIES= VIA=http FLOW=orders WEBHOOKS=1  options of the demo
#   FLOW=stream MESSAGES=200000 SOURCE=kafka  and of its stream

STARTED := $(shell date +%s)
VENV := .venv/bin
# Each test starts processes: what one has compiled, the next one reads.
export PYTHONDONTWRITEBYTECODE =
# The sandbox's addresses; set your own to use another provider or mail server.
export STRIPE_API_BASE ?= http://127.0.0.1:8420
export SMTP_URL ?= smtp://127.0.0.1:8425
export CARRIER_URL ?= http://127.0.0.1:8430
# These processes share their counters here; `make metrics` shows the sums.
api worker relay beat metrics: export PROMETHEUS_MULTIPROC_DIR ?= $(CURDIR)/var/metrics
comma := ,
with_services = env="$$($(VENV)/python -m services env)" && eval "$$env" && exec

.DEFAULT_GOAL := help
.PHONY: check cluster cluster-down help venv pins audit docs kubernetes web-pictures up down status demo api fuzz test long test-lowest test-python versions ecosystem celery-suite edge-suite faults drill chaos chaos-many controls search saga-programs saga-crashes saga-deploy rollout stores lint types sandbox worker relay beat flower doctor metrics bench soak capacity profile clean migrate

help:
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: .venv/ready ## create .venv, or update it when pyproject.toml or requirements/pinned.txt changed

.venv/ready: pyproject.toml requirements/pinned.txt
	@PYTHON='$(PYTHON)' scripts/bootstrap

# With the pip of .venv, by hand: it asks the package index.
pins: .venv/ready ## write the hashes of all versions in constraints.txt and requirements/*.txt
	@$(VENV)/python scripts/pins.py

.venv-audit/ready: requirements/pinned-audit.txt
	@$(if $(PYTHON),$(PYTHON),$(VENV)/python) -m venv --clear .venv-audit
	@.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement $<
	@touch $@

audit: .venv/ready .venv-audit/ready ## ask an advisory service about all pinned versions; ARGS='-s osv'
	@.venv-audit/bin/python scripts/audit.py $(ARGS)

.venv-docs/ready: requirements/pinned-docs.txt
	@$(if $(PYTHON),$(PYTHON),$(VENV)/python) -m venv --clear .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement $<
	@touch $@

.venv-kubernetes/ready: requirements/pinned-kubernetes.txt
	@$(if $(PYTHON),$(PYTHON),$(VENV)/python) -m venv --clear .venv-kubernetes
	@.venv-kubernetes/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --require-hashes --requirement $<
	@touch $@

# Nothing is applied: no cluster is asked.
kubernetes: .venv/ready .venv-kubernetes/ready ## write what deploy/kubernetes has of monitoring/rules.yml, and check it; CRDS=DIR: against the operators' own definitions, too
	@$(VENV)/python scripts/kubernetes.py
	@$(if $(CRDS),CRDS=$(abspath $(CRDS))) $(VENV)/python -m pytest tests/deploy $(ARGS)

# What needs the library is written by .venv; what is built of it, by .venv-docs. A link that leads nowhere is an error.
docs: .venv/ready .venv-docs/ready ## build the documentation as a site that works without a network: var/docs/site/index.html
	@$(VENV)/python -m scripts.docs
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)
	@echo "var/docs/site/index.html; with its search: python -m http.server --bind 127.0.0.1 --directory var/docs/site"

up: .venv/ready ## start Postgres, Redis and RabbitMQ for development; their data is kept
	@$(VENV)/python -m services up

down: .venv/ready ## stop them
	@$(VENV)/python -m services down

cluster: .venv/ready ## start three RabbitMQ nodes, Postgres with a standby, Redis with Sentinels, and print how to use them
	@$(VENV)/python -m services.cluster up

cluster-down: .venv/ready ## stop them
	@$(VENV)/python -m services.cluster down

status: .venv/ready ## show them
	@$(VENV)/python -m services status

demo: .venv/ready ## run the whole system under load and faults, then check the ledgers
	@$(VENV)/python -m demo --started $(STARTED) $(if $(PURCHASES),--purchases $(PURCHASES)) \
		$(if $(REFUNDS),--refunds $(REFUNDS)) $(if $(FLOW),--flow $(FLOW)) $(if $(COPIES),--copies $(COPIES)) $(if $(VIA),--via $(VIA)) $(if $(WEBHOOKS),--webhooks) $(if $(MESSAGES),--messages $(MESSAGES)) $(if $(SOURCE),--source $(SOURCE)) $(ARGS)

test: .venv/ready .venv-kubernetes/ready ## run all tests against real servers
	@$(if $(POOLER),POOLER=1) $(if $(PARTITIONED),PARTITIONED=$(PARTITIONED)) $(VENV)/python -m pytest --numprocesses $(or $(WORKERS),4) --dist loadfile --no-loadscope-reorder $(ARGS)

ecosystem: .venv/ready ## install other packages of the Celery world into .venv, and test beside them
	@$(VENV)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		--constraint constraints.txt --editable '.[ecosystem,bench]'
	@$(VENV)/python -m pytest -m ecosystem tests/ecosystem tests/http/test_litestar.py $(ARGS)

# Every kind of use, without the long ones: bodies, deliveries, the relay, dead letters, the command line, the pools, Django.
TESTS ?= tests/unit tests/integration/test_core.py tests/integration/test_connections.py tests/integration/test_sessions.py \
	tests/integration/test_hints.py tests/integration/test_batch_neighbours.py tests/integration/test_relay.py tests/integration/test_dead_letters.py \
	tests/integration/test_versions.py tests/integration/test_tls.py tests/integration/test_publishing.py tests/integration/test_bodies.py tests/django \
	tests/pipeline/test_cli.py tests/pipeline/test_pools.py
quick_tests = --numprocesses $(or $(WORKERS),3) --dist loadfile $(TESTS) $(ARGS)

test-lowest: .venv/ready ## run the quick tests with the lowest versions that pyproject.toml accepts; TESTS=tests/unit
	@scripts/with-versions lowest .venv/bin/python requirements/pinned-lowest.txt -- $(quick_tests)

test-python: ## run them with another Python, from 3.12 on with Django 6; VERSION=3.13 TESTS=tests/unit
	@scripts/with-versions $(or $(VERSION),3.12) python$(or $(VERSION),3.12) -- $(quick_tests)

versions: ## all that a new version may break: lowest, Python 3.12 and 3.13, other packages, a pooler, Celery's own tests
	@$(MAKE) --no-print-directory test-lowest
	@$(MAKE) --no-print-directory test-python VERSION=3.12
	@$(MAKE) --no-print-directory test-python VERSION=3.13
	@$(MAKE) --no-print-directory ecosystem
	@$(MAKE) --no-print-directory test POOLER=1
	@$(MAKE) --no-print-directory celery-suite

chaos: .venv/ready ## random faults against the whole pipeline, then the checks; SECONDS=60 SEED=1; CLUSTER=1: against clusters
	@$(VENV)/python -m tests.chaos $(if $(CLUSTER),--cluster) --record --seconds $(or $(SECONDS),60) --seed $(or $(SEED),1) $(ARGS)

chaos-many: .venv/ready ## several chaos runs with random seeds, and a table of results; RUNS=10 SECONDS=300
	@$(VENV)/python -m tests.chaos.many --runs $(or $(RUNS),10) --seconds $(or $(SECONDS),300) $(ARGS)

fuzz: .venv/ready ## try parsers of keys, signatures and URLs, requests made from the OpenAPI document, and webhooks; MINUTES=10: parsers only, for so long; EXAMPLES=1000
	@$(VENV)/python -m tests.fuzz --minutes $(or $(MINUTES),1) $(ARGS)
	@$(if $(MINUTES),:,EXAMPLES=$(or $(EXAMPLES),1000) $(VENV)/python -m pytest tests/pipeline/test_api_fuzz.py tests/orders/test_webhooks.py \
		--timeout 3600)

# Programs and interleavings that are drawn are more here, too.
long: .venv/ready ## the tests that make test leaves out, and more random programs than it tries
	@STATE_MACHINE_EXAMPLES=$(or $(PROGRAMS),500) ORDER_SEEDS=36 $(VENV)/python -m pytest --numprocesses $(or $(WORKERS),4) \
		--dist loadfile --no-loadscope-reorder --timeout 600 -m long $(ARGS)

controls: .venv/ready ## remove each safeguard in turn: its test must fail
	@$(VENV)/python -m tests.controls $(ARGS)

search: .venv/ready ## try the schedules of every pair of actors; PREEMPTIONS=2 PAIRS=attempt+cancel SEEDS=1-500 JOBS=2; ALL=1: in every scenario
	@$(VENV)/python -m tests.search --preemptions $(or $(PREEMPTIONS),2) --jobs $(or $(JOBS),2) $(if $(ALL),,--fitting) \
		$(if $(PAIRS),--pairs $(PAIRS)) $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

saga-programs: .venv/ready ## run random saga programs under kills, and compare them with an oracle; PROGRAMS=2000 SEED=1
	@$(VENV)/python -m tests.sagas.programs --programs $(or $(PROGRAMS),2000) --seed $(or $(SEED),1) $(ARGS)

saga-crashes: .venv/ready ## kill every consumer and saga of the application at every moment, and compare its books; FLOW=orders
	@$(VENV)/python -m tests.saga_crashes --flow $(or $(FLOW),orders) $(ARGS)

saga-deploy: .venv/ready ## replace the code under waiting sagas, beside it, badly and repaired, and check each one's path; SAGAS=1000
	@$(VENV)/python -m tests.saga_deploy --sagas $(or $(SAGAS),1000) $(ARGS)

rollout: .venv/ready ## older code under load, the newest schema and code zone by zone, a bad release and the way back; FROM=0015 (a commit, or the last one of a schema)
	@$(VENV)/python -m tests.rollout $(if $(FROM),--from $(FROM)) $(if $(SECONDS),--seconds $(SECONDS)) $(ARGS)

stores: .venv/ready ## what each store of records promises: run the tests that show it, and print the table
	@$(VENV)/python -m tests.stores $(ARGS)

drill: .venv/ready ## incidents in a running system, each ended by a script that only reads the alert and its runbook; ONLY=declined,read-only
	@$(VENV)/python -m drill $(if $(ONLY),--only $(ONLY)) $(ARGS)

web-pictures: .venv/ready ## take the pictures of the page for docs/web.md with Chromium
	@$(VENV)/python -m pytest tests/web/pictures.py $(ARGS)

faults: .venv/ready ## run the fault matrix and write docs/faults.md; for a part of it ARGS='-k F1-P2'
	@$(VENV)/python -m tests.faults $(ARGS)

celery-suite: .venv/ready ## Celery's own integration tests on plain tasks and on ours, and write docs/celery-suite.md; ARGS='-k chord'
	@$(VENV)/python -m tests.celery_suite $(ARGS)

edge-suite: .venv/ready ## the tests of a published middleware for Idempotency-Key on it and on ours, and write docs/edge-suite.md
	@$(VENV)/python -m tests.edge_suite

check: .venv/ready ## what CI runs: all tests, lint and types
	@$(MAKE) --no-print-directory --keep-going test lint types

lint: .venv/ready ## ruff: lint and formatting
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .

types: .venv/ready ## mypy, strict
	@$(VENV)/mypy $(ARGS)

sandbox: .venv/ready ## run the sandboxes of the payment provider, the mail server and the carrier
	@mkdir -p var/sandbox
	@exec $(VENV)/python -m sandbox all --provider-port 8420 --mail-port 8425 --carrier-port 8430 --data var/sandbox $(ARGS)

migrate: up ## migrate the development database
	@$(with_services) sh -c '$(VENV)/idempotency migrate -A tasks && $(VENV)/python -m tasks.migrate'

api: migrate ## serve the application over HTTP on 127.0.0.1:8000
	@$(with_services) $(VENV)/python -m uvicorn --factory api.application:create_app $(ARGS)

worker: migrate ## run a Celery worker
	@$(with_services) $(VENV)/celery -A tasks worker $(ARGS)

relay: migrate ## run the relay from the outbox to the broker
	@$(with_services) $(VENV)/idempotency relay -A tasks $(ARGS)

beat: migrate ## run Celery beat
	@$(with_services) $(VENV)/celery -A tasks beat --schedule var/celerybeat-schedule $(ARGS)

flower: up ## run Flower on 127.0.0.1:5555 with FLOWER_BASIC_AUTH=user:password, or a generated password
	@if [ -z "$$FLOWER_BASIC_AUTH" ]; then \
		export FLOWER_BASIC_AUTH="flower:$$($(VENV)/python -c 'import secrets; print(secrets.token_urlsafe(12))')"; \
		echo "http://127.0.0.1:5555  user and password $$FLOWER_BASIC_AUTH"; \
	fi; \
	$(with_services) $(VENV)/celery -A tasks flower --address=127.0.0.1 $(ARGS)

doctor: up ## check the set-up for what would lose work, do it twice or expose it
	@$(with_services) $(VENV)/idempotency doctor -A tasks $(ARGS)

metrics: migrate ## serve the backlog and all processes' counters for Prometheus on 127.0.0.1:9540
	@$(with_services) $(VENV)/idempotency metrics -A tasks $(ARGS)

# What QUICK=1 runs: each key once, duplicates, batches, the relay, latency, and claims beside large tables.
quick := unique,duplicates,batch,relay,latency,scale,waiting,purge
# The other benchmarks need none of what this installs.
contests := unique duplicates storm outside enqueue batch sagas
bench: .venv/ready ## compare with plain Celery and what else there is; ONLY=unique,duplicates,storm,outside,enqueue,batch,relay,http,latency,backlog,ordering,resend,scale,waiting,purge,held; QUICK=1: unique, duplicates, batch, relay, latency, scale, waiting and purge, with 3 rounds, fewer jobs and smaller tables; ARGS='--plot DIR --json'; ONLY=life: what operations leave behind; ONLY=start: import and help; ONLY=sagas,saga_length,saga_waits; ONLY=partitions; ONLY=stores: Redis beside Postgres; ONLY=stream
	@$(if $(or $(if $(ONLY),,all),$(filter $(contests),$(subst $(comma), ,$(ONLY)))),$(VENV)/python -m pip install --quiet --disable-pip-version-check \
		--no-build-isolation --constraint constraints.txt --editable '.[bench]')
	@$(VENV)/python -m benchmarks $(if $(or $(ONLY),$(QUICK)),--only $(or $(ONLY),$(quick))) $(if $(QUICK),--rounds 3 --messages 400 --records 1000000) $(ARGS)

soak: .venv/ready ## a long run under load: slopes of memory, files, connections, tables, queues; OPERATIONS=1000000; CLUSTER=1: through clusters that fail over; ARGS='--plot DIR'
	@$(VENV)/python -m benchmarks.soak $(if $(CLUSTER),--cluster) --operations $(or $(OPERATIONS),1000000) $(ARGS)

capacity: .venv/ready ## what an operation costs each component, and what very many need: rewrites docs/capacity.md; OPERATIONS=10000 WAITING=10000000
	@$(VENV)/python -m benchmarks.capacity $(if $(OPERATIONS),--operations $(OPERATIONS)) $(if $(WAITING),--waiting $(WAITING)) $(ARGS)

profile: .venv/ready ## measure function calls, CPU, round trips and time per phase of one attempt
	@$(VENV)/python -m benchmarks.profile $(ARGS)

clean: ## stop the servers; remove their data, .venv and all caches
	@if [ -x $(VENV)/python ]; then $(VENV)/python -m services down; fi
	rm -rf .venv var .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
