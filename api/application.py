"""The application: `uvicorn --factory api.application:create_app`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer

from idempotency.application import close_runtime, runtime_of
from idempotency.attempt.runtime import Runtime
from idempotency.http import IdempotencyMiddleware
from idempotency.http.asgi import Application, Receive, Scope, Send
from idempotency.waiting import Ends
from tasks import app as celery

from . import admin, health, operations, problems, submissions, webhooks
from .callers import Authentication, Callers, is_write, tenant_of
from .operators import Operators, RateLimits

JSON = ("application/json",)
DESCRIPTION = "Payments, refunds, orders and returns, each carried out once for its Idempotency-Key."


class KeyedRoutes:
    """Puts the routes where a key makes something happen once behind the library's middleware, and no others."""

    def __init__(self, app: Application) -> None:
        self.app = app
        self._keyed = IdempotencyMiddleware(app, runtime=_runtime, tenant=tenant_of, required=True, media_types=JSON)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._keyed if is_write(scope) else self.app)(scope, receive, send)


def create_app() -> FastAPI:
    """The application, which opens its connections when it is started."""
    app = FastAPI(title="Shop", description=DESCRIPTION, version="1", lifespan=_lifespan, redirect_slashes=False)
    app.openapi = lambda: problems.describe(app)  # type: ignore[method-assign]
    problems.install(app)
    tenants = [Depends(HTTPBearer(scheme_name="API key", auto_error=False))]
    operators = [Depends(HTTPBearer(scheme_name="operator's token", auto_error=False))]
    app.include_router(submissions.router, dependencies=tenants)
    app.include_router(operations.router, dependencies=tenants)
    app.include_router(admin.router, dependencies=operators)
    app.include_router(webhooks.router)
    app.include_router(health.router)
    # from the inside out
    app.add_middleware(KeyedRoutes)
    app.add_middleware(Operators)
    app.add_middleware(operations.PreferWait)
    app.add_middleware(Authentication, callers=Callers(_runtime))
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.ends = Ends(_runtime())
    app.state.readiness = health.ReadinessCheck()
    app.state.admin_limits = RateLimits()
    yield
    app.state.ends.close()
    close_runtime(celery)


def _runtime() -> Runtime:
    return runtime_of(celery)
