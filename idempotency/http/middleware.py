"""The middleware: a keyed request is carried out once, and every further one gets the same answer.

    app.add_middleware(IdempotencyMiddleware, runtime=runtime, required=True)

Plain ASGI, on claim, run and commit (`attempt/run.py`), without Celery and without a web framework.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from ..attempt.runtime import Runtime
from ..errors import InvalidKey, MissingKey, SettingsError, WrongCell
from ..observe.logs import log
from ..wire.keys import HTTP_TASK, OperationId, check_key
from . import options
from .asgi import Application, Receive, Scope, Send
from .attempt import RequestAttempt
from .exchange import Exchange, Terms
from .key import FIELD, checked_key
from .problems import Refused, problem
from .quota import Quotas
from .request import Limits, Request, read
from .response import KEPT_HEADERS
from .rules import Rule, ServerErrors, rule_of
from .threads import Threads

MIB = 1024 * 1024


class IdempotencyMiddleware:
    """Answer repeated requests from the record of the first, by their header `Idempotency-Key`.

    `runtime`: what `idempotency.attempt.runtime.Runtime` has made, or a function that returns it, which is asked with each
    request: for a server that forks, and for a lifespan that closes it. Where tenants are in cells, a function of the tenant
    may return the runtime of its cell; a tenant of another cell is answered with 421. `tenant(scope)`: whose keys these are;
    without a function, all are of the setting `tenant`. `required`: whether a request without a key is refused; may be a
    function of the scope. `methods`: the keyed ones; others pass through.

    Sizes in bytes: `body_limit` of a request, decoded; `response_limit` of an answer that replays repeat with its body
    (default and maximum: the setting `result_limit`); `spool_limit` of any answer. `media_types`: those that a request
    may have; None: all. `kept_headers`: those of the first answer that replays repeat.

    `decide(status)` says what an answer means (`Rule`); `server_errors="store"` keeps 5xx as answers. `concurrency`:
    threads, one for each keyed request that is carried out (default: twice the setting `pool_size`, all connections that
    the runtime may open; with `tenant`, half of them for one tenant alone); further requests wait for `patience` seconds,
    then they are answered with 503.
    Raises `SettingsError` for a limit that cannot be kept, and for an option that would have no effect.
    """

    def __init__(
        self,
        app: Application,
        *,
        runtime: Runtime | Callable[[], Runtime] | Callable[[str], Runtime],
        tenant: Callable[[Scope], str] | None = None,
        required: bool | Callable[[Scope], bool] = False,
        methods: Collection[str] = ("POST", "PATCH"),
        body_limit: int = MIB,
        media_types: Collection[str] | None = None,
        response_limit: int | None = None,
        spool_limit: int = 64 * MIB,
        kept_headers: Collection[str] = KEPT_HEADERS,
        decide: Callable[[int], Rule] | None = None,
        server_errors: ServerErrors = "release",
        concurrency: int | None = None,
        patience: float = 5.0,
    ) -> None:
        self.app = app
        self._given_runtime = runtime
        self._is_by_tenant = options.takes_tenant(runtime)
        if self._is_by_tenant and tenant is None:
            raise SettingsError("tenant: has to be given where the runtime is a function of it")
        self._tenant = tenant
        self._required = required
        options.check_functions(runtime=runtime, tenant=tenant, required=required, decide=decide)
        options.check_server_errors(server_errors)
        self._methods = options.methods(methods)
        self._limits = Limits(body_limit, options.media_types(media_types))
        self._response_limit = response_limit
        self._spool_limit = spool_limit
        self._kept_headers = options.headers(kept_headers)
        self._rule_of = partial(rule_of, decide=decide, server_errors=server_errors)
        self._concurrency = concurrency
        self._patience = patience
        # of each cell: one whose Postgres hangs takes no other's
        self._threads: dict[str | None, Threads] = {}
        self._quotas = Quotas()
        if isinstance(runtime, Runtime):
            self._terms(runtime)  # refuse wrong limits at start, not with the first request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in self._methods or _is_carried_out(scope):
            return await self.app(scope, receive, send)
        try:
            key = self._key(scope)
            if key is None:
                return await self.app(scope, receive, send)
            tenant = self._tenant_of(scope)
            request = await read(scope, receive, self._limits)
            if request is not None:
                await self._carry_out(request, tenant, key, send)
        except Refused as refused:
            await refused.answer(scope, receive, send)

    def _key(self, scope: Scope) -> str | None:
        key = checked_key(scope)
        if key is None and (self._required(scope) if callable(self._required) else self._required):
            detail = f"{FIELD}: required for this request; a new one for each operation, the same when it is repeated"
            raise Refused(problem(400, "idempotency_key_missing", f"{FIELD} is missing", detail))
        return key

    def _tenant_of(self, scope: Scope) -> str:
        if self._tenant is None:
            return self._runtime("").settings.tenant
        try:
            return check_key(self._tenant(scope), field="tenant")
        except MissingKey:
            raise SettingsError(
                "tenant: the function has returned None; it has to name whose keys these are, or to be left out"
            ) from None
        except InvalidKey as error:  # what it comes from is in the request
            raise Refused(problem(400, "tenant_invalid", "Not a tenant", str(error))) from None

    async def _carry_out(self, request: Request, tenant: str, key: str, send: Send) -> None:
        try:
            runtime = self._runtime(tenant)
            runtime.settings.check_cell(tenant)
        except WrongCell as error:
            log.warning("http_wrong_cell", error=str(error))
            raise Refused(problem(421, "other_cell", "Not served here", "This tenant is served elsewhere.")) from None
        exchange = Exchange(
            self.app, request, OperationId(tenant, HTTP_TASK, key), runtime, self._terms(runtime), self._quotas
        )
        outcome = await self._started_threads(runtime).run(exchange.id, exchange.work, exchange.peek)
        try:
            await exchange.answer(outcome, send)
        finally:
            exchange.close()

    def _runtime(self, tenant: str) -> Runtime:
        given: Any = self._given_runtime
        # a function is asked each time: a lifespan that ends closes its runtime, and the next one opens another
        if isinstance(given, Runtime):
            return given
        found: Runtime = given(tenant) if self._is_by_tenant else given()
        return found

    def _started_threads(self, runtime: Runtime) -> Threads:
        cell = runtime.settings.cell
        if cell not in self._threads:
            most = self._concurrency or 2 * runtime.settings.pool_size
            self._threads[cell] = Threads(most, self._patience, tenants=self._tenant is not None)
        return self._threads[cell]

    def _terms(self, runtime: Runtime) -> Terms:
        most = runtime.settings.result_limit
        limit = most if self._response_limit is None else self._response_limit
        if limit > most:
            raise SettingsError(
                f"response_limit must not be above result_limit: response_limit={limit} result_limit={most}"
            )
        return Terms(self._rule_of, self._kept_headers, limit, self._spool_limit)


def _is_carried_out(scope: Scope) -> bool:
    """Whether the same middleware stands outside, as when an application that has it is mounted in another one."""
    return isinstance(scope.get("state", {}).get("idempotency"), RequestAttempt)
