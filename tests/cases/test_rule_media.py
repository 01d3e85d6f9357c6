"""Rules of CONTRACT that concern media (MM, TK5), held on the chain and the models that the recipes use."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax.core.error import InvariantError
from relax.core.media import Medium
from relax.core.message import Prompt
from relax.core.protocol import Limits
from relax.data.dataset import Refusal
from relax.data.media import codec
from relax.data.media.batch import CodecBatches
from relax.data.stream import read_prompts
from relax.model.logprob import entropy, scaled_logits, token_logprobs
from relax.model.media import media_inputs, row_positions
from tests.cases.media_chain import OMNI, SIGHT, Chain, facts_of, features, model_of
from tests.data import media_sample as sample
from tests.data.toy import source_config, write_lines
from tests.model.media_case import counts, image, message, setting

PICTURE = sample.picture(40, 24)


@pytest.mark.parametrize("model", [OMNI, SIGHT])
async def test_rule_tk5_mm4_placeholders_have_no_share_in_any_distribution(tmp_path: Path, model: str) -> None:
    """However likely the model finds them: what engine and trainer measure is over the other tokens alone."""
    facts, policy = facts_of(model), model_of(model)
    placeholders = set(facts.family.placeholders.values())
    assert placeholders <= set(facts.vocabulary.placeholder_ids)
    without_token = set(range(facts.vocabulary.size)) - set(facts.tokenizer.get_vocab().values())
    assert len(without_token) == 2
    refused = set(np.flatnonzero(~facts.vocabulary.allowed).tolist())
    assert placeholders | without_token <= refused
    assert facts.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|im_end|>"])[1] not in refused
    chain = Chain(tmp_path, model=model)
    _, encoded, media = await chain.row({"prompt": "<image>What?", "images": [PICTURE]})
    ids = torch.tensor(encoded.token_ids[None]).long()
    with torch.no_grad():
        inputs = media_inputs(policy, chain.family, ids, [chain.family.encode(policy, media)])
        positions = row_positions(chain.family, [(encoded.token_ids, media)])
        logits = policy(**inputs, position_ids=positions, use_cache=False).logits[0]
    allowed = torch.tensor(facts.vocabulary.allowed)
    eager = logits.clone()
    eager[:, sorted(refused)] += 50.0
    every = torch.tensor(sorted(set(range(facts.vocabulary.size)) - refused))
    for temperature in (0.7, 1.0):
        found = [token_logprobs(eager, torch.full((len(eager),), int(token)), temperature, allowed) for token in every]
        shares = torch.stack(found, dim=1)
        torch.testing.assert_close(shares.exp().sum(dim=1), torch.ones(len(eager)), rtol=0, atol=1e-5)
        plain = torch.log_softmax((logits.double() / temperature)[:, allowed], dim=-1)
        torch.testing.assert_close(shares.double(), plain, rtol=0, atol=2e-6)
        assert torch.equal(entropy(eager, temperature, allowed), entropy(logits, temperature, allowed))
        assert torch.isneginf(scaled_logits(eager, temperature, allowed)[:, sorted(refused)]).all()
    for token in placeholders:
        with pytest.raises(InvariantError, match=rf"\[TK5\].*\[{token}\]"):
            token_logprobs(logits, torch.full((len(logits),), token), 1.0, allowed)


def test_rule_tk4_characters_that_markers_are_made_of_stay_in_every_part_beside_media() -> None:
    """The markers of one conversation are characters that none of its texts holds, wherever its media stand."""
    one = setting("qwen3_vl")
    words = ["\ue0003\ue001 <|image_pad|>", "\ue000\ue001", "\ue0020\ue003<|im_end|>"]
    encoded = one.renderer.encode(
        [message("user", image(16, 16), words[0], image(16, 16), words[1]), message("tool", words[2])]
    )
    assert counts(one, encoded.token_ids) == {"image": 8, "video": 0}
    shown = one.tokenizer.decode(encoded.token_ids)
    assert all(text in shown for text in words)


async def test_rule_mm2_a_group_looks_and_decodes_once_for_all_its_siblings_and_turns(tmp_path: Path) -> None:
    """Twice the same picture in a prompt is one picture; what is cached is keyed by content and by what is done to it."""
    content, sound = sample.encode_image(PICTURE), sample.encode_sound(sample.tone(4000))
    chain = Chain(tmp_path)
    (prompt,) = chain.prompts({"prompt": "<image><audio><image>", "images": [content, content], "audios": [sound]})
    assert prompt is not None

    async def sibling() -> tuple[Medium, ...]:
        prepared = await chain.preparer.prepare(prompt)
        return await chain.preparer.load(chain.renderer.encode(prepared.messages).parts)

    found = [*await asyncio.gather(*(sibling() for _ in range(8))), await sibling()]
    assert chain.pool.calls == {"look": 2, "decode": 2}
    assert len({id(medium) for media in found for medium in media}) == 2
    assert all(media[0] is media[2] for media in found)
    smaller = {"prompt": "<image>", "images": [{"bytes": content, "max_pixels": 300}]}
    _, encoded, media = await chain.row(smaller, name="smaller")
    assert chain.pool.calls == {"look": 2, "decode": 3}, "its header is known; other pixels are wanted"
    assert media[0].key != found[0][0].key
    assert chain.counts(encoded.token_ids) == features(media) == {"image": 2, "audio": 0, "video": 0}


async def test_rule_mm6_a_record_reads_from_the_folder_of_its_own_source_alone(tmp_path: Path) -> None:
    """Without configured roots: not the neighbour's media, not what a link or a path leads to, and nothing by the network."""
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(sample.encode_image(PICTURE))
    (tmp_path / "mine" / "link.png").symlink_to(tmp_path / "theirs" / "x.png")
    (tmp_path / "mine" / "inner.png").symlink_to("x.png")
    paths = [
        "x.png",
        "inner.png",
        "link.png",
        "../theirs/x.png",
        str(tmp_path / "theirs" / "x.png"),
        "http://localhost/x.png",
    ]
    chain = Chain(tmp_path, roots=None)
    found = []
    for name in ("theirs", "mine"):
        lines = [{"prompt": "<image>", "images": [path], "reference": "1"} for path in paths]
        path = write_lines(tmp_path / name / "a.jsonl", *lines)
        config = source_config(name=name, path=str(path), media_keys={"image": "images"})
        found = read_prompts(config, renderer=chain.renderer, rules=chain.rules, quarantine=chain.quarantine)
    read = await asyncio.gather(*map(chain.preparer.prepare, found), return_exceptions=True)
    assert [isinstance(one, Prompt) for one in read] == [True, True, False, False, False, False]
    assert [one.reason for one in read if isinstance(one, Refusal)] == ["forbidden path"] * 3 + ["forbidden host"]
    assert len(chain.refused()) == 4


async def test_rule_rr7_a_call_that_comes_while_the_last_batch_ends_is_not_forgotten() -> None:
    """Whoever gets a result may ask for the next thing in the same turn of the event loop."""

    class Instant:
        async def run(self, function: Any, *args: Any, limits: Limits) -> Any:
            return args[0]

    batches = CodecBatches(Instant(), 1)
    async with asyncio.timeout(10):
        for number in range(3):
            assert await batches.run(codec.look, number, num_bytes=1, limits=Limits(1.0)) == number
    await batches.close()
