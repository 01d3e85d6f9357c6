"""What a run reads: its sources, their mixture for each stage, the prompts of evaluation sets, and the media of them all.

Built by `assembly` from the configuration; opens nothing before it is asked. Every prompt that a run sees comes through here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from relax.config.section import StageConfig
from relax.config.tree import RunConfig
from relax.core.message import Prompt
from relax.core.protocol import Source
from relax.data.mixture import Mixture, build_streams
from relax.data.quarantine import Quarantine
from relax.data.renderer import TextRenderer
from relax.data.stream import PromptRules, PromptStream, read_prompts


@dataclass
class Supply:
    """Each part is built once, when it is first asked for."""

    config: RunConfig
    quarantine: Quarantine
    renderer: TextRenderer

    @cached_property
    def streams(self) -> dict[str, PromptStream]:
        """The endless prompts of every source; stages that share one go on where the last stopped."""
        return build_streams(
            self.config.data.sources,  # type: ignore[arg-type]
            renderer=self.renderer,
            rules=self.rules,
            quarantine=self.quarantine,
            seed=self.config.run.seed,
            accept_changes=self.config.data.accept_changes,
        )

    def source(self, stage: StageConfig) -> Source:
        """The prompts of a stage: its sources, mixed by weight."""
        weights = {node.name: node.weight for node in self.config.sources_of(stage)}  # type: ignore[attr-defined]
        data = self.config.data
        return Mixture(
            {name: self.streams[name] for name in weights},
            weights,
            curriculum=data.curriculum,
            accept_changes=data.accept_changes,
        )

    def prompts(self, source: Any, max_records: int | None) -> Sequence[Prompt]:
        """One pass over the source of an evaluation set."""
        return read_prompts(
            source,
            renderer=self.renderer,
            rules=self.rules,
            quarantine=self.quarantine,
            seed=self.config.run.seed,
            max_records=max_records,
        )

    @property
    def rules(self) -> PromptRules:
        return PromptRules(self.config.data.max_prompt_tokens, self.config.data.system_prompt)
