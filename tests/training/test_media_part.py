"""Parts of a model that reads media: trained or frozen, with a rate of their own, and what is kept of frozen encoders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from relax.config.base import check_rules
from relax.core.error import UserError
from relax.core.media import Medium
from relax.training.config import AdamWConfig, LinearConfig, LoraConfig, PartConfig, SgdConfig, TorchConfig
from relax.training.encoder import Encoders
from relax.training.part import parameter_parts
from tests.training import setting
from tests.training.media_setting import (
    KINDS,
    OMNI,
    OMNI_25,
    VL,
    family_of,
    make_backend,
    make_media_row,
    make_media_rows,
    make_medium,
    make_model,
)
from tests.training.setting import LOSS, gradient_gap, gradients_of, same_bits, total_weight, weights_of

HEARS = (OMNI, OMNI_25)


def config_of(lora: LoraConfig | None = None, freeze: tuple[str, ...] = (), **parts: PartConfig) -> TorchConfig:
    return TorchConfig(device="cpu", parts=parts, lora=lora, freeze=freeze)


FROZEN = config_of(vision=PartConfig(train=False), projector=PartConfig(train=False), audio=PartConfig(train=False))
VISION_FROZEN = config_of(vision=PartConfig(train=False), projector=PartConfig(train=False))


def train(backend: Any, rows: list[Any], steps: int = 1) -> list[Any]:
    reports = []
    for _ in range(steps):
        reports.append(backend.forward_backward([[tuple(rows)]], LOSS))
        assert backend.optim_step(total_weight(rows)).applied
    return reports


def moved(kind: str, backend: Any) -> dict[str, float]:
    """How far the parameters of each part have moved from where they were made, at most."""
    before = {name: one.detach() for name, one in make_model(kind).named_parameters()}
    owners = parameter_parts(backend._trained.model, family_of(kind))
    found: dict[str, float] = {}
    for name, one in backend._trained.model.named_parameters():
        distance = float((one.detach() - before[name]).abs().max())
        found[owners[one]] = max(found.get(owners[one], 0.0), distance)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_belongs_to_one_part_and_none_of_an_encoder_to_the_language_model(kind: str) -> None:
    model = make_model(kind)
    owners = parameter_parts(model, family_of(kind))
    named = {name: owners[one] for name, one in model.named_parameters()}
    assert set(named.values()) == {"vision", "projector", "language"} | ({"audio"} if kind in HEARS else set())
    for name, part in named.items():
        assert (part == "language") == (".language_model." in name or name.startswith("lm_head.")), name
        assert part != "vision" or ".visual." in name
        assert part != "audio" or ".audio_tower." in name


def test_a_projector_within_a_pattern_of_its_encoder_is_a_part_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, family = make_model(VL), family_of(VL)
    apart = parameter_parts(model, family)
    patterns = {"audio": ("none",), "vision": ("*visual.*",), "projector": ("*merger*",)}
    monkeypatch.setattr(family, "parts", lambda: patterns)
    assert parameter_parts(model, family) == apart
    monkeypatch.setattr(family, "parts", lambda: dict(reversed(patterns.items())))
    assert parameter_parts(model, family) == apart


@pytest.mark.parametrize("part", ["vision", "audio", "projector", "language"])
def test_a_frozen_part_stays_and_the_others_move(part: str) -> None:
    backend = make_backend(OMNI, config=config_of(**{part: PartConfig(train=False)}))
    train(backend, make_media_rows(OMNI))
    found = moved(OMNI, backend)
    assert found.pop(part) == 0
    assert all(distance > 1e-4 for distance in found.values()), found


def test_gradients_of_what_is_trained_do_not_depend_on_what_is_frozen() -> None:
    rows = make_media_rows(OMNI)
    whole, part = make_backend(OMNI), make_backend(OMNI, config=FROZEN)
    for backend in (whole, part):
        backend.forward_backward([[tuple(rows)]], LOSS)
    expected, found = gradients_of(whole), gradients_of(part)
    assert gradient_gap({name: expected[name] for name in found}, found) <= 1e-6
    assert all(".language_model." in name or name.startswith("lm_head.") for name in found)


@pytest.mark.parametrize(
    "optimizer", [AdamWConfig(lr=1e-3, weight_decay=0.1), SgdConfig(lr=1e-3)], ids=["adamw", "sgd"]
)
def test_a_part_has_a_rate_of_its_own_and_the_schedule_scales_all(optimizer: Any) -> None:
    config = config_of(vision=PartConfig(lr=1e-4), audio=PartConfig(lr=1e-2))
    backend = make_backend(OMNI, config=config)
    backend.begin(optimizer, LinearConfig(), 4)
    owners = parameter_parts(backend._trained.model, family_of(OMNI))
    expected = {"vision": 1e-4, "audio": 1e-2, "projector": 1e-3, "language": 1e-3}
    for factor in (1.0, 0.75):
        train(backend, make_media_rows(OMNI))
        for group in backend._optimizer.param_groups:
            assert all(group["lr"] == pytest.approx(expected[owners[one]] * factor) for one in group["params"])
            decays = {one.ndim >= 2 for one in group["params"]}
            assert len(decays) == 1
            assert group["weight_decay"] == (optimizer.weight_decay if decays.pop() else 0.0)
    listed = [one for group in backend._optimizer.param_groups for one in group["params"]]
    assert len(listed) == len(set(listed)) == len(backend._parameters)


def test_a_rate_of_a_part_is_that_of_a_whole_optimizer_of_that_rate() -> None:
    """One Adam step with rates by part moves each part as far as a step with that rate alone."""
    rows = make_media_rows(OMNI)
    both = make_backend(OMNI, config=config_of(audio=PartConfig(lr=1e-2)), grad_clip=None)
    slow, fast = (make_backend(OMNI, optimizer=AdamWConfig(lr=lr), grad_clip=None) for lr in (1e-3, 1e-2))
    for backend in (both, slow, fast):
        train(backend, rows)
    owners = parameter_parts(both._trained.model, family_of(OMNI))
    for name, one in both._parameters.items():
        other = fast if owners[one] == "audio" else slow
        assert torch.equal(one, other._parameters[name]), name


def test_without_rates_of_their_own_the_optimizer_is_as_it_was() -> None:
    plain, named = make_backend(VL), make_backend(VL, config=config_of(vision=PartConfig(), language=PartConfig()))
    for backend in (plain, named):
        train(backend, make_media_rows(VL), 2)
    assert same_bits(weights_of(plain), weights_of(named))
    assert len(named._optimizer.param_groups) == 2


def test_a_part_that_the_model_has_not_is_refused_with_those_it_has() -> None:
    with pytest.raises(
        UserError, match="parts names 'audio', which is no part of the model; it has language, projector, vision"
    ):
        make_backend(VL, config=config_of(audio=PartConfig(train=False)))
    with pytest.raises(
        UserError, match="parts names 'eyes', which is no part of the model; it has audio, language, proj"
    ):
        make_backend(OMNI, config=config_of(eyes=PartConfig()))


def test_a_part_of_a_model_of_text_is_refused() -> None:
    with pytest.raises(UserError, match="parts names 'vision', but the model reads text only and has no parts"):
        setting.make_backend(config=config_of(vision=PartConfig(train=False)))


def test_freezing_every_part_leaves_nothing_to_train() -> None:
    with pytest.raises(UserError, match="no parameter that needs a gradient"):
        make_backend(
            VL, config=config_of(**{name: PartConfig(train=False) for name in ("vision", "projector", "language")})
        )


def test_settings_without_effect_are_refused() -> None:
    for config, sentence in (
        (config_of(vision=PartConfig(train=False, lr=1e-3)), "has no effect with `train: false`"),
        (config_of(LoraConfig(), vision=PartConfig()), "has no effect with `lora`"),
    ):
        with pytest.raises(ValidationError, match=sentence):
            check_rules(config)


def test_patterns_and_parts_freeze_together() -> None:
    backend = make_backend(VL, config=config_of(freeze=("embeddings", "*layers.0.*"), vision=PartConfig(train=False)))
    assert backend._parameters
    for name in backend._parameters:
        assert not any(word in name for word in ("embed_tokens", "layers.0.", "visual.blocks", "visual.patch_embed")), (
            name
        )


@pytest.mark.parametrize("config", [config_of(vision=PartConfig(lr=1e-4)), VISION_FROZEN], ids=["rates", "frozen"])
def test_a_run_with_parts_goes_on_bit_for_bit(config: TorchConfig, tmp_path: Path) -> None:
    rows = make_media_rows(OMNI)
    saved, loaded = make_backend(OMNI, config=config), make_backend(OMNI, seed=1, config=config)
    train(saved, rows, 2)
    saved.capture().write(str(tmp_path))
    train(loaded, rows)
    loaded.load(str(tmp_path))
    for backend in (saved, loaded):
        train(backend, rows, 2)
    assert same_bits(weights_of(saved), weights_of(loaded))


def test_a_state_goes_on_with_other_rates_but_not_with_other_frozen_parts(tmp_path: Path) -> None:
    rows = make_media_rows(VL)
    saved = make_backend(VL)
    train(saved, rows)
    saved.capture().write(str(tmp_path))
    faster = make_backend(VL, config=config_of(vision=PartConfig(lr=1e-2)))
    faster.load(str(tmp_path))
    train(faster, rows)
    frozen = make_backend(VL, config=config_of(vision=PartConfig(train=False)))
    before = weights_of(frozen)
    with pytest.raises(UserError, match=r"give the model and freeze, parts and lora of training\.backend as they were"):
        frozen.load(str(tmp_path))
    assert same_bits(before, weights_of(frozen))


# --- what is kept of frozen encoders ---


def work_of(report: Any) -> dict[str, int]:
    return {
        name.rpartition("/")[2]: int(one.value)
        for name, one in report.measures.items()
        if name.startswith("training/encoder/")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_medium_of_a_frozen_encoder_is_encoded_once_in_a_run(kind: str) -> None:
    config = FROZEN if kind in HEARS else VISION_FROZEN
    rows, backend = make_media_rows(kind), make_backend(kind, config=config)
    media = {medium.key for row in rows for medium in row.media}
    first, second = train(backend, rows, 2)
    assert work_of(first)["media"] == len(media)
    assert work_of(second) == {"media": 0, "tokens": 0, "kept": len(media)}
    backend.logprobs([[tuple(rows)]])
    # Nothing kept, the same weights.
    unkept = make_backend(kind, config=config.model_copy(update={"kept_encoder_tokens": 0}))
    third, fourth = train(unkept, rows, 2)
    assert work_of(third) == work_of(fourth) == work_of(first)
    assert same_bits(weights_of(backend), weights_of(unkept))


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (config_of(), set()),
        (config_of(vision=PartConfig(train=False)), set()),
        (config_of(projector=PartConfig(train=False)), set()),
        (config_of(language=PartConfig(train=False)), set()),
        (VISION_FROZEN, {"image", "video"}),
        (config_of(freeze=("*visual.*",)), {"image", "video"}),
        (config_of(audio=PartConfig(train=False), projector=PartConfig(train=False)), {"audio"}),
        (FROZEN, {"image", "audio", "video"}),
        (config_of(lora=LoraConfig(rank=4)), {"image", "audio", "video"}),
    ],
    ids=["nothing", "vision", "projector", "language", "vision+projector", "pattern", "audio+projector", "all", "lora"],
)
def test_only_what_nothing_trained_has_a_hand_in_is_kept(config: TorchConfig, kept: set[str]) -> None:
    rows, backend = make_media_rows(OMNI), make_backend(OMNI, config=config)
    media: dict[str, Medium] = {medium.key: medium for row in rows for medium in row.media}
    train(backend, rows)
    backend.logprobs([[tuple(rows)]])
    report = backend.forward_backward([[tuple(rows)]], LOSS)
    again = [one for one in media.values() if one.modality not in kept]
    assert work_of(report)["kept"] == len(media) - len(again)
    assert work_of(report)["media"] == len(again)
    fresh = make_backend(OMNI, config=config)
    train(fresh, rows)
    (values,), (expected,) = backend.logprobs([[tuple(rows)]]), fresh.logprobs([[tuple(rows)]])
    assert all((a == b).all() for a, b in zip(values[0], expected[0], strict=True)), "nothing stale was used"


def test_logprobs_before_training_decide_as_training_does() -> None:
    """Without gradients nothing seems to be trained: an encoder that is must not be taken for a frozen one."""
    rows, backend = make_media_rows(VL), make_backend(VL)
    backend.logprobs([[tuple(rows)]])
    train(backend, rows)
    fresh = make_backend(VL)
    train(fresh, rows)
    assert same_bits(weights_of(backend), weights_of(fresh))
    assert work_of(backend.forward_backward([[tuple(rows)]], LOSS))["kept"] == 0


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    model = make_model(VL).requires_grad_(False)
    rows = [make_media_row(VL, seed, [("image", seed)]) for seed in range(6)]
    tokens = [row.media[0].encoder_tokens for row in rows]
    encoders = Encoders(family_of(VL), max_kept_tokens=sum(tokens[:3]))

    def run(*indices: int) -> tuple[int, int]:
        encoders.encode(model, tuple(rows[index] for index in indices))
        work = encoders.take_work()
        assert encoders._kept.tokens <= sum(tokens[:3])
        return work.encoded, work.kept

    assert run(0, 1, 2) == (3, 0)
    assert run(2, 0, 1) == (0, 3)
    assert run(3) == (1, 0)
    assert run(0, 3) == (0, 2), "the one used longest ago has gone"
    assert run(2)[0] == 1
    big = make_media_row(VL, 9, [("video", 2)])
    small = Encoders(family_of(VL), max_kept_tokens=big.media[0].encoder_tokens - 1)
    for _ in range(2):
        small.encode(model, (big,))
    assert small.take_work().encoded == 2, "what is larger than all of it is never kept"


def test_what_is_kept_is_forgotten_when_other_weights_are_loaded(tmp_path: Path) -> None:
    rows = make_media_rows(VL)
    other = make_backend(VL, seed=1, config=VISION_FROZEN)
    train(other, rows)
    other.capture().write(str(tmp_path))
    backend = make_backend(VL, config=VISION_FROZEN)
    train(backend, rows)
    backend.load(str(tmp_path))
    (found,), (expected,) = backend.logprobs([[tuple(rows)]]), other.logprobs([[tuple(rows)]])
    assert all((a == b).all() for a, b in zip(found[0], expected[0], strict=True))


def test_equal_keys_are_one_medium() -> None:
    assert make_medium(VL, "image", 1) is make_medium(VL, "image", 1)
    assert make_medium(VL, "image", 1).key != make_medium(VL, "image", 2).key
