"""What users get wrong about media, met by whole runs: parts that an environment makes, folders that are not there."""

import base64
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from relax.config.base import ComponentConfig
from relax.core.error import UserError
from relax.core.message import MediaPart, Message, Prompt, TextPart
from relax.core.protocol import Step
from tests.e2e.media import picture_bytes
from tests.e2e.test_media import LIMITS, media_config
from tests.e2e.tiny import open_ledger, train


class CarelessConfig(ComponentConfig):
    type: str = "tests.e2e.test_media_user:Careless"
    uri: str | None = None
    options: dict[str, Any] = {}  # noqa: RUF012


class Careless:
    """Shows a picture at once, with whatever address and options its author wrote; even groups are spared."""

    Config = CarelessConfig

    def __init__(self, config: Any) -> None:
        self._config = config

    async def start(self, prompt: Prompt) -> tuple[Message, ...]:
        if prompt.key.record % 2 == 0:
            return prompt.messages
        uri: Any = self._config.uri
        return (
            *prompt.messages,
            Message("user", (MediaPart("image", uri, options=self._config.options), TextPart("?"))),
        )

    async def step(self, reply: Message) -> Step:
        return Step(done="done")

    async def close(self) -> None: ...


PNG = "data:image/png;base64," + base64.b64encode(picture_bytes(1)).decode()


@pytest.mark.parametrize(
    ("uri", "options", "reason"),
    [
        (None, {}, "mistyped medium: uri of the image is a NoneType"),
        (PNG, {"max_pixels": "many"}, "mistyped media option: max_pixels of the image is 'many'"),
    ],
)
async def test_a_part_that_an_environment_made_wrong_fails_its_group_and_no_other(
    tmp_path: Path, uri: str | None, options: dict[str, Any], reason: str
) -> None:
    stages = [{"name": "rl", "steps": 1, "groups_per_step": 4, "algorithm": {"type": "grpo", "group_size": 2}}]
    env = {"type": "tests.e2e.test_media_user:Careless", "uri": uri, "options": options}
    config = media_config(tmp_path, env=env, stages=stages)
    await train(config)
    with closing(open_ledger(config)) as ledger:
        counts = ledger.counts()
        groups = [ledger.group(f"g{number:06d}") or {} for number in range(sum(counts.values()))]
    failures = [str(group["reason"]) for group in groups if group.get("state") == "failed"]
    assert counts["trained"] == 4
    assert failures
    assert all(reason in failure for failure in failures), failures


async def test_a_run_does_not_begin_with_a_root_that_is_no_folder(tmp_path: Path) -> None:
    data = media_config(tmp_path).data
    source = data.sources[0].model_dump()
    missing = str(tmp_path / "nowhere")
    section = {"sources": [source], "max_prompt_tokens": 400, "media": {**LIMITS, "roots": [missing]}}
    with pytest.raises(UserError, match=r"data\.media\.roots: '.*nowhere' is not a folder"):
        await train(media_config(tmp_path, data=section))
