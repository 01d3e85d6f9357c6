"""Weight versions: `(incarnation, number)`, ordered (WS1).

`number` counts published steps; 0 is the initial policy. A trainer that restarts below a number it has published
starts a new incarnation, so two different sets of weights never share a version.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Version:
    incarnation: int = 0
    number: int = 0

    def __str__(self) -> str:
        return f"v{self.number}" if self.incarnation == 0 else f"v{self.number}.i{self.incarnation}"

    def next(self) -> "Version":
        """The version that the next step publishes."""
        return Version(self.incarnation, self.number + 1)
