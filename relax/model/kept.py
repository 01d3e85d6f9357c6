"""Outputs of encoders, kept by medium so that later turns, siblings and steps need not compute them again.

Used by engines and training, each with weights of its own: whoever changes them calls `clear`. Invariant: what is kept stands for at
most `max_tokens` encoder tokens; media used longest ago go first, and one larger than that is not kept.
"""

from collections import OrderedDict
from collections.abc import Iterable

from relax.core.media import Medium
from relax.model.family import Encoding


class KeptEncodings:
    """`tokens` is how many encoder tokens the kept media have; `max_tokens` 0 keeps none."""

    def __init__(self, max_tokens: int) -> None:
        self.tokens = 0
        self._max_tokens = max_tokens
        self._kept: OrderedDict[str, tuple[Encoding, int]] = OrderedDict()

    def __contains__(self, medium: Medium) -> bool:
        return medium.key in self._kept

    def get(self, medium: Medium) -> Encoding | None:
        """What was kept for a medium, which is now the one used last."""
        if medium.key not in self._kept:
            return None
        self._kept.move_to_end(medium.key)
        return self._kept[medium.key][0]

    def put(self, medium: Medium, encoding: Encoding) -> None:
        """Keep what was made of a medium, in place of what was before."""
        self.drop([medium])
        if medium.encoder_tokens > self._max_tokens:
            return
        self._kept[medium.key] = (encoding, medium.encoder_tokens)
        self.tokens += medium.encoder_tokens
        while self.tokens > self._max_tokens:
            _, (_, tokens) = self._kept.popitem(last=False)
            self.tokens -= tokens

    def drop(self, media: Iterable[Medium]) -> None:
        """Forget what was made of these media."""
        for medium in media:
            self.tokens -= self._kept.pop(medium.key, (None, 0))[1]

    def clear(self) -> None:
        """Forget everything: other weights serve from now on."""
        self._kept.clear()
        self.tokens = 0
