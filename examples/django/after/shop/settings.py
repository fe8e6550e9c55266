import os

from idempotency.queues import quorum_queue

SECRET_KEY = os.environ.get("SECRET_KEY", "only for development")
INSTALLED_APPS = [
    "orders",
    "idempotency.contrib.django",
]
# host, user and password come from libpq's own variables: PGHOST, PGUSER, ...
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ.get("PGDATABASE", "shop")}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
CELERY_BROKER_URL = os.environ.get("BROKER_URL", "amqp://")
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_DEFAULT_QUEUE = "orders"
CELERY_TASK_QUEUES = [quorum_queue("orders")]
CELERY_TASK_CREATE_MISSING_QUEUES = False
CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}
