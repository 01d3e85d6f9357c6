"""Counter-based random numbers (DE1): the number for token `i` of a request depends on `(seed, offset + i)` and on nothing else.

Called by the sampler and the emulated engine. splitmix64 (Steele, Lea, Flood 2014, fig. 14), evaluated at any counter
directly, so no state is kept and batch composition, slot and arrival cannot matter.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def hashes(seeds: npt.ArrayLike, counters: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """uint64[n]: 64 well-mixed bits for each pair of a seed and a counter (both taken modulo 2^64)."""
    seed, counter = _words(seeds), _words(counters)
    with np.errstate(over="ignore"):
        state = _mixed(seed) + (counter + np.uint64(1)) * _GAMMA
        return _mixed(state)


def uniforms(seeds: npt.ArrayLike, counters: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """float64[n] in [0, 1): 53 random bits each."""
    return (hashes(seeds, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _words(values: npt.ArrayLike) -> npt.NDArray[Any]:
    return np.atleast_1d(np.asarray(values)).astype(np.uint64)


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))
