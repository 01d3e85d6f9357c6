"""What the end-to-end tests of media need: records of every modality made by code, an environment that shows a picture, a reward."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from relax.config.base import ComponentConfig
from relax.core.message import MediaPart, Message, Prompt, TextPart
from relax.core.protocol import Step

OMNI = "recipes/models/qwen3-omni-tiny"
RATE = 16_000


def picture_bytes(number: int, size: int = 32, format: str = "PNG") -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def mixed(seed: int, *, count: int = 24) -> Iterator[dict[str, Any]]:
    """Text, picture, sound, video, and all of them, one after the other."""
    random = np.random.default_rng(0)
    for number in range(count):
        kind = number % 5
        record: dict[str, Any] = {"prompt": "a?", "reference": "a", "images": [], "audios": [], "videos": []}
        if kind in (1, 4):
            record["images"] = [picture_bytes(number)]
        if kind in (2, 4):
            record["audios"] = [{"array": random.normal(0, 0.1, 4000 + 100 * number), "sampling_rate": RATE}]
        if kind in (3, 4):
            record["videos"] = [{"array": random.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8), "fps": 2.0}]
        names = "<image>" * len(record["images"]) + "<audio>" * len(record["audios"])
        record["prompt"] = names + "<video>" * len(record["videos"]) + "a?"
        yield record


def hostile_records(seed: int, *, folder: str) -> Iterator[dict[str, Any]]:
    """One record for each file of a folder, named `<modality>-<number>`; each stands between two good ones."""
    for number, path in enumerate(sorted(Path(folder).iterdir())):
        modality = path.name.partition("-")[0]
        lists = {"images": [], "audios": [], "videos": []} | {f"{modality}s": [str(path)]}
        yield {"prompt": f"<{modality}>a?", "reference": "a", "name": path.name, **lists}
        yield {"prompt": "<image>a?", "reference": "a", "images": [picture_bytes(number)], "audios": [], "videos": []}


KEYS = {"image": "images", "audio": "audios", "video": "videos"}


class LookAgainConfig(ComponentConfig):
    type: str = "tests.e2e.media:LookAgain"
    max_turns: int = 2


class LookAgain:
    """Answers the first reply with a picture of its own, and ends after the second."""

    Config = LookAgainConfig

    def __init__(self, config: Any) -> None:
        self._turns = 0

    async def start(self, prompt: Prompt) -> tuple[Message, ...]:
        return prompt.messages

    async def step(self, reply: Message) -> Step:
        self._turns += 1
        if self._turns == 2:
            return Step(done="done")
        uri = "data:image/png;base64," + base64.b64encode(picture_bytes(77)).decode()
        return Step((Message("user", (MediaPart("image", uri), TextPart("again?"))),))

    async def close(self) -> None: ...
