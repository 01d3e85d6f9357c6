"""What the failed request of an engine elsewhere leads to."""

from typing import Any

import pytest

from relax.core.error import EngineError
from relax.engines.refusal import RefusedError
from relax.services.remote.engine import AttachedService


class Failing:
    def __init__(self, error: Exception) -> None:
        self._error = error

    async def generate(self, *request: Any) -> Any:
        raise self._error


@pytest.mark.parametrize(("error", "doubts"), [(EngineError("no answer"), 1), (RefusedError("too long"), 0)])
async def test_a_failed_request_brings_the_server_into_doubt_and_a_refused_one_does_not(
    error: Exception, doubts: int
) -> None:
    told = list[None]()
    service = AttachedService(Failing(error), lambda: told.append(None))
    request: Any = None
    with pytest.raises(type(error), match=str(error)):
        await service.generate(request, request, request)
    assert len(told) == doubts
