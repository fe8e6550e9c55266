FROM python:3.12-slim

ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /app

# The exact versions first: this layer is rebuilt only when they or the project's own requirements change.
COPY pyproject.toml constraints.txt README.md LICENSE idempotency_pytest.py ./
COPY idempotency ./idempotency
RUN pip install --no-cache-dir --constraint constraints.txt '.[app]'

COPY celeryconfig.py ./
COPY tasks ./tasks

RUN useradd --system --no-create-home app
USER app
CMD ["celery", "-A", "tasks", "worker"]
