FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app

# Dependencies and the library first, so that changes to the application do not rebuild this layer.
COPY pyproject.toml constraints.txt README.md LICENSE idempotency_pytest.py ./
COPY idempotency ./idempotency
RUN pip install --no-cache-dir --constraint constraints.txt '.[app]'

COPY celeryconfig.py ./
COPY tasks ./tasks
COPY api ./api
COPY scripts/certificates.py ./scripts/

RUN useradd --system --no-create-home app
USER app
CMD ["celery", "-A", "tasks", "worker"]
