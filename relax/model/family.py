"""What is particular to one family of models that read media: how a medium becomes placeholders, features, encoder outputs, positions.

Used by data (layout and features), engines and training (encoders and positions). One small file in `families/` for each family,
and one line in the table below; everything else carries media blindly. No function here sees undecoded bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from relax.config.table import load_object
from relax.core.media import Arrays, Medium, Modality
from relax.core.message import Json, MediaPart
from relax.model.load import ModelConfig

Tensor: TypeAlias = Any
"""A torch.Tensor; this file is read where torch is not."""
Positions: TypeAlias = npt.NDArray[np.float32]
"""[3, T]: time, height and width of each token (M-RoPE; Wang et al. 2024, section 2.1)."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """What the encoder made of one medium: `embeds` [num_tokens, width], and `deep`, one more of that shape for each of the first
    layers of the language model that adds them to its own (DeepStack; Meng et al. 2024); empty where the family has none."""

    modality: Modality
    embeds: Tensor
    deep: tuple[Tensor, ...] = ()


class Family(Protocol):
    """Built as `Family(model_config, folder, tokenizer)`: the processor's settings are read from the model's folder."""

    modalities: tuple[Modality, ...]
    placeholders: Mapping[Modality, int]
    """The token that stands for one feature of each modality."""
    names: Mapping[Modality, str]
    """What the chat template writes once for each medium, and `slot` replaces: that token, or it with marks around it."""

    def target(self, part: MediaPart) -> Mapping[str, Json]:
        """What to decode a looked-at part to, JSON-ready, from its facts and options alone.

        image: width, height. audio: rate, and samples at that rate. video: width, height, frames (indices to take), fps (of what
        is taken), and audio (a target as for a sound) when its sound is read too. Raises DataError for what the family refuses.
        """
        ...

    def slot(self, part: MediaPart) -> str:
        """What stands in the prompt in place of the template's placeholder: every placeholder, and what the family writes between."""
        ...

    def key(self, part: MediaPart) -> str:
        """The key of what `features` makes of a looked-at part, before it is decoded: equal keys, equal features."""
        ...

    def features(self, part: MediaPart, decoded: Arrays) -> tuple[Medium, ...]:
        """The features of decoded arrays (image uint8 [H, W, 3]; audio float32 [N]; video uint8 [F, H, W, 3] with "audio" beside
        it), in float32. Raises DataError for arrays that are not what `target` asked for."""
        ...

    def encode(self, model: Any, media: Sequence[Medium]) -> list[Encoding]:
        """Run the encoders of `model`, differentiably; one encoding for each medium, in order."""
        ...

    def positions(self, token_ids: npt.NDArray[np.int32], media: Sequence[Medium]) -> Positions:
        """The position of every token, which depends on nothing behind it; after the last medium they go on by one from the last
        token's. Raises InvariantError when the placeholders are not those of the media (MM1)."""
        ...

    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """Patterns of parameter names of each trainable part beside the language model: vision, audio, projector."""
        ...


FAMILIES: Mapping[str, str] = {
    "qwen2_5_vl": "relax.model.families.qwen2_5_vl:Qwen25VL",
    "qwen3_vl": "relax.model.families.qwen3_vl:Qwen3VL",
    "qwen3_vl_moe": "relax.model.families.qwen3_vl:Qwen3VL",
    "qwen2_5_omni": "relax.model.families.qwen2_5_omni:Qwen25Omni",
    "qwen2_5_omni_thinker": "relax.model.families.qwen2_5_omni:Qwen25Omni",
    "qwen3_omni_moe": "relax.model.families.qwen3_omni:Qwen3Omni",
    "qwen3_omni_moe_thinker": "relax.model.families.qwen3_omni:Qwen3Omni",
}
"""By `model_type` of config.json."""


def find_family(model_config: ModelConfig, folder: Path, tokenizer: Any) -> Family | None:
    """The family of a model, with the processor settings in its folder; None for a model that reads text only."""
    name = FAMILIES.get(model_config.model_type)
    if name is None:
        return None
    family: Family = load_object(name)(model_config, folder, tokenizer)
    return family
