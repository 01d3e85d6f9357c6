"""What a run reads: its sources, their mixture for each stage, the prompts of evaluation sets, and the media of them all.

Built by `assembly` from the configuration; opens nothing before it is asked. Every prompt that a run sees comes through here.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax.config.section import StageConfig
from relax.config.tree import RunConfig
from relax.core.error import UserError
from relax.core.message import Prompt
from relax.core.protocol import Source
from relax.data.media.access import MediaAccess
from relax.data.media.cache import feature_cache
from relax.data.media.origin import Origins
from relax.data.mixture import Mixture, build_streams
from relax.data.quarantine import Quarantine
from relax.data.renderer import TextRenderer
from relax.data.stream import PromptRules, PromptStream, read_prompts
from relax.model.family import FAMILIES, Family
from relax.runtime.pool import ProcessPool

if TYPE_CHECKING:
    from relax.data.media.prepare import PromptPreparer


@dataclass
class Supply:
    """Each part is built once, when it is first asked for."""

    config: RunConfig
    quarantine: Quarantine
    renderer: TextRenderer
    family: Family | None

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

    @cached_property
    def rules(self) -> PromptRules:
        data = self.config.data
        origins = None if data.media is None else Origins(has_roots=bool(data.media.roots))
        return PromptRules(data.max_prompt_tokens, data.system_prompt, origins)

    @cached_property
    def media(self) -> "PromptPreparer | None":
        """Reads images, sounds and videos; None in a run that reads text only. Raises UserError when the model does."""
        section = self.config.data.media
        if section is None or self.rules.media is None:
            return None
        if self.family is None:
            raise UserError(
                f"data.media is set, but the model {self.config.model.path!r} reads text only; leave data.media out, or choose a "
                f"model of the kinds {', '.join(FAMILIES)}"
            )
        # What decodes takes most of a second to import, which every process of a run that reads text only would pay.
        from relax.data.media.prepare import PromptPreparer
        from relax.data.media.store import MediaStore

        access = MediaAccess(section, self.rules.media)
        cache = feature_cache(section.cache, int(section.cache_bytes))
        store = MediaStore(section, self.family, self._pool, access, cache)
        return PromptPreparer(store, self.renderer, self.rules, self.quarantine)

    @cached_property
    def _pool(self) -> ProcessPool:
        """Of its own: a slow film must not hold up rewards."""
        section, runtime = self.config.data.media, self.config.runtime
        assert section is not None
        unsafe = getattr(runtime, "unsafe_pool_without_isolation", False)
        return ProcessPool(section.processes, unsafe_without_isolation=unsafe)

    async def check(self) -> None:
        """Raises UserError when media must be read and a root is no folder, or nothing isolates what decodes them here (SE3)."""
        if self.media is not None:
            assert self.config.data.media is not None
            await asyncio.to_thread(_check_roots, self.config.data.media.roots)
            await self._pool.check()

    async def close(self) -> None:
        """Idempotent."""
        if "media" in self.__dict__ and self.media is not None:
            await self.media.store.close()
            await self._pool.close()


def _check_roots(roots: Sequence[str]) -> None:
    for root in roots:
        if not Path(root).expanduser().is_dir():
            raise UserError(f"data.media.roots: {root!r} is not a folder; name the folders that media lie in")
