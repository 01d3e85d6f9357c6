"""Carries out what the autoscaling policy wants, as operations that a person can see and cancel.

Run by the controller's process when `rollout.autoscale` is set.
"""

import logging
from collections.abc import Callable
from typing import NoReturn

from relax.core.error import UserError
from relax.core.protocol import Clock
from relax.services.autoscale import Autoscaler, FleetLoad
from relax.services.control.operator import Operator
from relax.services.control.request import Restart, Scale, subject_of

_log = logging.getLogger(__name__)


async def autoscale(
    scaler: Autoscaler, look: Callable[[], FleetLoad], operator: Operator, clock: Clock, every_s: float
) -> NoReturn:
    """Endless. Consumes: looks at the fleet. Waits for: the next look. Unblocked by: time, for a load is a mean over time."""
    while True:
        await clock.sleep(every_s)
        load = look()
        wanted = scaler.decide(load)
        if wanted.replicas == load.replicas or _is_busy(operator):
            continue
        _log.info("autoscale: %s", wanted.reason)
        try:
            operator.submit(Scale({"rollout": wanted.replicas}, wanted.reason))
        except UserError as error:
            _log.warning("autoscale wants %d engines, but: %s", wanted.replicas, error)


def _is_busy(operator: Operator) -> bool:
    """Whether somebody changes roles already: what follows from that is not known yet."""
    subject = subject_of(Restart(""))
    return any(not one.has_ended and subject_of(one.request) == subject for one in operator.book.all())
