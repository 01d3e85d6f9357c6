"""What the families that see and hear have in common: sounds, and videos whose sound lies among their frames.

A family says how a sound is padded, how many tokens it takes, and in which order those of a video and its sound come.
"""

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from relax.core.completion import frozen
from relax.core.error import DataError, InvariantError
from relax.core.media import Arrays, Medium, Modality
from relax.core.message import Json, MediaPart
from relax.model.families.picture import PictureFamily
from relax.model.family import Encoding
from relax.model.feature import feature_tensor
from relax.model.load import ModelConfig
from relax.model.position import Block, Offsets, grid_offsets, line_offsets
from relax.model.processor import sound_settings
from relax.model.sound import clip_samples, log_mel
from relax.model.vision import grid_tokens

Runs: TypeAlias = list[tuple[Modality, int]]
"""Tokens of a video and its sound in the order in which they come: so many of this modality, then so many of that."""


class OmniFamily(PictureFamily):
    """A family that reads sounds as well. `pads` says that sounds are padded behind, `marks_pair` that the marks around a video
    with sound come in pairs that share a position, `whole_times` that times are cut to integers."""

    modalities: tuple[Modality, ...] = ("image", "audio", "video")
    pads = False
    marks_pair = False
    whole_times = False

    def __init__(self, model_config: ModelConfig, folder: Path, tokenizer: Any) -> None:
        super().__init__(model_config, folder, tokenizer)
        written = self._files.settings("feature_extractor")
        self._sound = sound_settings(folder, written, self._config.audio_config)
        self._rate = float(self._config.position_id_per_seconds)
        start = self._config.audio_start_token_id
        self._audio_marks = [
            str(getattr(tokenizer, "audio_bos_token", None) or self._token(start)),
            str(
                getattr(tokenizer, "audio_eos_token", None)
                or self._token(getattr(self._config, "audio_end_token_id", start + 1))
            ),
        ]

    def slot(self, part: MediaPart) -> str:
        if part.type == "audio":
            return self.names["audio"] * self._sound_tokens(self.target(part)["samples"])
        return super().slot(part)

    def features(self, part: MediaPart, decoded: Arrays) -> tuple[Medium, ...]:
        target = self.target(part)
        if part.type == "audio":
            return (self._sound_medium(part, target, decoded, self.key(part)),)
        (seen,) = super().features(part, decoded)
        if part.type == "image" or target["audio"] is None:
            return (seen,)
        heard = self._sound_medium(part, target["audio"], decoded, f"{self.key(part)}/audio")
        arrays = {**seen.arrays, "sound_tokens": frozen(np.array([heard.num_tokens]))}
        return Medium(seen.key, "video", seen.num_tokens, seen.encoder_tokens, arrays), heard

    def encode(self, model: Any, media: Sequence[Medium]) -> list[Encoding]:
        heard = [number for number, medium in enumerate(media) if medium.modality == "audio"]
        seen = [number for number in range(len(media)) if number not in heard]
        found = dict(zip(seen, super().encode(model, [media[number] for number in seen]), strict=True))
        found |= zip(heard, self._hear(model, [media[number] for number in heard]), strict=True)
        return [found[number] for number in range(len(media))]

    def parts(self) -> Mapping[str, tuple[str, ...]]:
        parts = super().parts()
        return {
            **parts,
            "audio": tuple(
                f"*audio_tower.{name}" for name in ("conv*", "layers.*", "ln_post.*", "audio_bos_eos_token.*")
            ),
            "projector": (*parts["projector"], "*audio_tower.proj*"),
        }

    def _target(self, part: MediaPart) -> Mapping[str, Json]:
        if part.type == "audio":
            return self._sound_target(part, part.facts)
        target = super()._target(part)
        if part.type == "image" or not part.options.get("audio") or part.facts.get("audio") is None:
            return target
        return {**target, "audio": self._sound_target(part, part.facts["audio"])}

    def _sound_target(self, part: MediaPart, facts: Any) -> dict[str, Json]:
        target = clip_samples(part, facts, self._sound)
        if self._sound_tokens(target["samples"]) < 1:
            raise DataError(f"the sound of {part.uri!r} is too short: {target['samples']} samples make no token")
        return target

    def _sound_medium(self, part: MediaPart, target: Mapping[str, Json], decoded: Arrays, key: str) -> Medium:
        sound = decoded["audio"]
        if sound.shape != (target["samples"],) or sound.dtype != np.float32:
            raise DataError(
                f"the sound of {part.uri!r} was decoded to {sound.dtype}{list(sound.shape)}, expected"
                f" float32[{target['samples']}]; its header does not tell the truth"
            )
        frames = log_mel(sound, self._sound_frames(len(sound)), self._sound, padded=self.pads)
        arrays = {"input_features": frozen(frames)}
        return Medium(key, "audio", self._sound_tokens(len(sound)), frames.shape[1], arrays)

    def _hear(self, model: Any, media: Sequence[Medium]) -> list[Encoding]:
        """Sounds whose chunks are padded alike go through the encoder together, so that none depends on its neighbours."""
        groups: dict[int, list[int]] = {}
        for number, medium in enumerate(media):
            groups.setdefault(self._padding(medium.encoder_tokens), []).append(number)
        found: dict[int, Encoding] = {}
        for numbers in groups.values():
            found |= zip(numbers, _hear_together(model, [media[number] for number in numbers]), strict=True)
        return [found[number] for number in range(len(media))]

    def _video_slot(self, part: MediaPart, target: Mapping[str, Json]) -> str:
        if target["audio"] is None:
            return super()._video_slot(part, target)
        sound = self._sound_tokens(target["audio"]["samples"])
        runs = self._weave(self._grid(target, self._video), sound, self._second_per_grid(target))
        return self._audio_marks[0] + "".join(self.names[one] * count for one, count in runs) + self._audio_marks[1]

    def _blocks(self, media: Sequence[Medium]) -> list[Block]:
        blocks: list[Block] = []
        waiting = list(media)
        while waiting:
            medium = waiting.pop(0)
            if medium.modality == "image":
                blocks.append(self._still(medium))
            elif medium.modality == "audio":
                blocks.append(
                    Block((medium.modality,) * medium.num_tokens, line_offsets(medium.num_tokens), medium.num_tokens)
                )
            elif "sound_tokens" not in medium.arrays:
                blocks += self._video_blocks(medium)
            elif waiting and waiting[0].modality == "audio":
                blocks.append(self._woven_block(medium, waiting.pop(0)))
            else:
                raise InvariantError("MM1", f"video {medium.key} comes without the sound that belongs to it")
        return blocks

    def _video_blocks(self, medium: Medium) -> list[Block]:
        offsets = self._video_offsets(medium)
        return [Block(("video",) * offsets.shape[1], offsets, float(offsets.max()) + 1)]

    def _woven_block(self, video: Medium, sound: Medium) -> Block:
        grid, interval = video.arrays["video_grid_thw"].tolist(), float(video.arrays["second_per_grid"][0])
        runs = self._weave(grid, sound.num_tokens, interval)
        modalities: tuple[Modality, ...] = tuple(chain.from_iterable(repeat(one, count) for one, count in runs))
        seen = np.array([one == "video" for one in modalities])
        offsets = np.empty((3, len(modalities)), np.float32)
        offsets[:, seen] = self._video_offsets(video)
        offsets[:, ~seen] = line_offsets(sound.num_tokens)
        # Text goes on behind the last run, which may not be the one that reaches furthest.
        return Block(modalities, offsets, float(offsets[:, -runs[-1][1] :].max()) + 1, self.marks_pair)

    def _video_offsets(self, medium: Medium) -> Offsets:
        grid, interval = medium.arrays["video_grid_thw"].tolist(), float(medium.arrays["second_per_grid"][0])
        return grid_offsets(grid, self._video.merge_size, interval, self._rate, whole=self.whole_times)

    def _video_settings(self) -> dict[str, Any]:
        """A folder that has settings for images only leaves the size of frames to the processor, whose own is for videos."""
        written = super()._video_settings()
        if not self._files.declares_video():
            for key in ("size", "min_pixels", "max_pixels"):
                written.pop(key, None)
        return written

    def _all_settings(self) -> list[Any]:
        return [*super()._all_settings(), self._sound]

    def _frame_tokens(self, grid: Sequence[int]) -> int:
        return grid_tokens([1, *grid[1:]], self._video)

    def _sound_frames(self, samples: int) -> int:
        raise NotImplementedError

    def _sound_tokens(self, samples: int) -> int:
        raise NotImplementedError

    def _padding(self, frames: int) -> int:
        """What the encoder pads the chunks of a sound to, when it is alone; any number where its neighbours do not matter."""
        raise NotImplementedError

    def _weave(self, grid: Sequence[int], sound_tokens: int, second_per_grid: float) -> Runs:
        """The order of the tokens of a video and its sound; the last run has the last patch whole, or the last of the sound."""
        raise NotImplementedError


def _hear_together(model: Any, media: Sequence[Medium]) -> list[Encoding]:
    import torch

    frames = [feature_tensor(medium, "input_features", model) for medium in media]
    lengths = torch.tensor([one.shape[1] for one in frames], device=model.device)
    padded = torch.nn.utils.rnn.pad_sequence([one.T for one in frames], batch_first=True).transpose(1, 2)
    mask = (torch.arange(padded.shape[2], device=model.device) < lengths[:, None]).long()
    output = model.get_audio_features(padded, feature_attention_mask=mask, return_dict=True)
    parts = torch.split(output.last_hidden_state, [medium.num_tokens for medium in media])
    return [Encoding("audio", part) for part in parts]
