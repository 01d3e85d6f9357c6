"""The control API of a run: a FastAPI application over `Control` and its operations.

Built by the server in the controller's process, inside its guard. Looks answer at once; everything that changes the run becomes
an operation, whose id the answer carries. Every error is JSON with a code, a message and what to do next.
"""

import logging
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Query
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from relax.core.error import UserError
from relax.core.message import Json
from relax.services.control.body import Ask, AttachBody, IdText, ScaleBody, Seconds
from relax.services.control.guard import problem
from relax.services.control.operation import ConflictError, CrowdedError, UnknownError
from relax.services.control.operator import Operator
from relax.services.control.request import (
    Attach,
    Checkpoint,
    Detach,
    Evaluate,
    Pause,
    Request,
    Restart,
    Resume,
    Scale,
    arguments_of,
    kind_of,
)
from relax.services.fleet_registry import EngineEntry

MAX_WAIT_S = 30.0
"""What a look at an operation may wait for its end."""

Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]

_log = logging.getLogger(__name__)
_LOOK = "GET /v1/roles, /v1/engines and /v1/operations show what there is"


def build_application(operator: Operator) -> FastAPI:
    """The paths below `/v1`. There is no page with documentation: it would load scripts from elsewhere."""
    app = FastAPI(
        title="relax",
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        dependencies=[Depends(_refuse_null)],
    )
    _add_looks(app, operator)
    _add_operations(app, operator)
    _add_changes(app, operator)
    _add_errors(app)
    return app


async def _refuse_null(request: HttpRequest) -> None:
    """A body may be left out; but `null` is one of the wrong type."""
    if (await request.body()).strip() == b"null":
        raise RequestValidationError([{"loc": ("body",), "msg": "must be an object, or be left out"}])


def _add_looks(app: FastAPI, operator: Operator) -> None:
    control = operator.control

    @app.get("/v1/run")
    async def run() -> Json:
        return dict(control.run())

    @app.get("/v1/roles")
    async def roles() -> Json:
        return {"roles": [role.to_json() for role in control.roles()]}

    @app.get("/v1/engines")
    async def engines() -> Json:
        return {"engines": [engine_json(engine) for engine in control.engines()]}


def _add_operations(app: FastAPI, operator: Operator) -> None:
    @app.get("/v1/operations")
    async def operations() -> Json:
        return {"operations": [operation.to_json() for operation in operator.book.all()]}

    @app.get("/v1/operations/{id}")
    async def operation(id: Name, wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0) -> Json:
        return (await operator.wait(id, wait_s)).to_json() if wait_s else operator.book.get(id).to_json()

    @app.delete("/v1/operations/{id}")
    async def cancel(id: Name) -> Json:
        return operator.cancel(id).to_json()


def _add_changes(app: FastAPI, operator: Operator) -> None:
    def asked(request: Request, ask: Ask | None) -> JSONResponse:
        ask = ask or Ask()
        if ask.dry_run:
            plan = list(operator.control.plan(request))
            return JSONResponse({
                "dry_run": True, "kind": kind_of(request), "arguments": arguments_of(request), "plan": plan,
            })  # fmt: skip
        operation = operator.submit(request, ask.id, ask.timeout_s)
        place = {"Location": f"/v1/operations/{operation.id}"}
        return JSONResponse(operation.to_json(), status_code=200 if operation.has_ended else 202, headers=place)

    @app.post("/v1/scale")
    async def scale(body: ScaleBody) -> JSONResponse:
        return asked(Scale(body.replicas), body)

    @app.post("/v1/engines")
    async def attach(body: AttachBody) -> JSONResponse:
        return asked(Attach(body.name, body.url, body.capacity, body.secret), body)

    @app.delete("/v1/engines/{name}")
    async def detach(
        name: Name, id: IdText | None = None, dry_run: bool = False, timeout_s: Seconds | None = None
    ) -> JSONResponse:
        return asked(Detach(name), Ask(id=id, dry_run=dry_run, timeout_s=timeout_s))

    @app.post("/v1/roles/{name}/restart")
    async def restart(name: Name, body: Ask | None = None) -> JSONResponse:
        return asked(Restart(name), body)

    @app.post("/v1/pause")
    async def pause(body: Ask | None = None) -> JSONResponse:
        return asked(Pause(), body)

    @app.post("/v1/resume")
    async def resume(body: Ask | None = None) -> JSONResponse:
        return asked(Resume(), body)

    @app.post("/v1/checkpoint")
    async def checkpoint(body: Ask | None = None) -> JSONResponse:
        return asked(Checkpoint(), body)

    @app.post("/v1/evaluate")
    async def evaluate(body: Ask | None = None) -> JSONResponse:
        return asked(Evaluate(), body)


def engine_json(engine: EngineEntry) -> dict[str, Json]:
    """An engine as JSON; the version as people write it, such as `v12`."""
    return {**asdict(engine), "version": None if engine.version is None else str(engine.version)}


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(UserError)
    async def refused(_: HttpRequest, error: UserError) -> JSONResponse:
        for kind, status, code in (
            (UnknownError, 404, "unknown"),
            (ConflictError, 409, "conflict"),
            (CrowdedError, 429, "crowded"),
            (UserError, 400, "refused"),
        ):
            if isinstance(error, kind):
                return JSONResponse(problem(code, str(error), _LOOK), status_code=status)
        raise error

    @app.exception_handler(RequestValidationError)
    async def invalid(_: HttpRequest, error: RequestValidationError) -> JSONResponse:
        # Never what was sent: it may hold a password.
        found = "; ".join(f"{_place(one['loc'])}: {one['msg']}" for one in error.errors()[:10])
        return JSONResponse(problem("invalid", found, "GET /v1/openapi.json says what each request holds"), 422)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: HttpRequest, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return JSONResponse(problem("no_such_path", message, _LOOK), error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def bug(_: HttpRequest, error: Exception) -> JSONResponse:
        message = f"a bug in relax: {type(error).__name__}"
        return JSONResponse(problem("bug", message, "the run's log has the traceback; please report it"), 500)


def _place(location: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in location) or "body"
