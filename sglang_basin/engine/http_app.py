"""What Basin adds to SGLang's HTTP server: the answer to refused calls and `GET /basin/status`.

Both come in by one hook, before the server starts, so that stock `sglang.launch_server` with Basin's configuration in
the environment serves the same as Basin's own launcher. SGLang adds its API-key middleware after that, around both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import sglang_basin
from sglang_basin import status
from sglang_basin.engine.metrics import fault
from sglang_basin.engine.refusals import RefusalMiddleware
from sglang_basin.engine.status import STATUS_RID

ANSWER_WITHIN_S = 5.0
"""The scheduler answers between two batches; a longer silence is worth telling."""

FRESH_S = 0.5
"""An answer this young serves the next client too: watchers never cost the scheduler more than two reports a second."""


def extend_app(server_args: Any, tokenizer_manager: Any, *rest: Any, **options: Any) -> None:
    """Before `http_server._setup_and_run_http_server`: add middleware and route to SGLang's app."""
    try:
        from sglang.srt.entrypoints.http_server import app
        from sglang.srt.utils.auth import AuthLevel, auth_level
        from starlette.middleware import Middleware

        reporter = Reporter(lambda: _ask_scheduler(tokenizer_manager))
        app.user_middleware.append(Middleware(RefusalMiddleware))  # type: ignore[arg-type]

        @app.get(status.PATH, include_in_schema=False)
        @auth_level(AuthLevel.ADMIN_OPTIONAL)  # it lists session names
        async def basin_status() -> Any:
            return await reporter.respond()

    except Exception:  # noqa: BLE001 - the server must start; admission itself does not need any of this
        fault("http", "could not extend the HTTP server: no /basin/status, and refusals look as SGLang writes them")


async def _ask_scheduler(tokenizer_manager: Any) -> list[Any]:
    """The schedulers' states, one a data-parallel rank, through SGLang's own channel to them."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    tokenizer_manager.auto_create_handle_loop()
    answers = await tokenizer_manager.get_internal_state_communicator(GetInternalStateReq(rid=STATUS_RID))
    return sorted((answer.internal_state["basin"] for answer in answers), key=lambda state: state["dp_rank"])


class Reporter:
    """Answers status requests; all that come while a question is on its way share its answer."""

    def __init__(self, ask: Callable[[], Awaitable[list[Any]]], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._asked: asyncio.Task[bytes] | None = None
        self._answered_s = float("-inf")

    async def respond(self) -> Any:
        from starlette.responses import JSONResponse, Response

        try:
            return Response(await self._report(), media_type="application/json")
        except TimeoutError:
            message = f"The scheduler has not answered within {ANSWER_WITHIN_S:g} s: it is in a long batch, or hangs."
            return JSONResponse({"error": {"message": message}}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def _report(self) -> bytes:
        if self._asked is None or (self._asked.done() and self._clock() - self._answered_s > FRESH_S):
            self._asked = asyncio.create_task(self._question())
        # Shielded: SGLang's communicator would take a late answer to a given-up question for the next one's.
        return await asyncio.wait_for(asyncio.shield(self._asked), ANSWER_WITHIN_S)

    async def _question(self) -> bytes:
        from sglang_basin import SGLANG_VERSION

        try:
            states = await self._ask()
            return status.encode_report({"basin": sglang_basin.__version__, "sglang": SGLANG_VERSION, "states": states})
        finally:
            self._answered_s = self._clock()
