FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app

# Dependencies and the library first, so that changes to the application do not rebuild this layer.
COPY requirements/pinned-app.txt ./requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes --requirement requirements/pinned-app.txt
COPY pyproject.toml README.md LICENSE idempotency_pytest.py ./
COPY idempotency ./idempotency
# a link in the package leads there
COPY docs/runbooks ./docs/runbooks
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

COPY celeryconfig.py ./
COPY tasks ./tasks
COPY api ./api
COPY scripts/certificates.py ./scripts/

# A number, which Kubernetes can tell from root's. /users and /schedule: the owner of a new volume that is mounted there.
RUN useradd --system --uid 999 --user-group --no-create-home app && install --directory --owner app /users /schedule
USER 999
CMD ["celery", "-A", "tasks", "worker"]
