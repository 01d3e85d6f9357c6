"""Cases C1 and C2 (weight sync) where they concern an adapter: what a LoRA run publishes."""

import pytest
import torch

from relax.core.error import InvariantError
from relax.core.version import Version
from relax.model.name import bind_tensors, published_tensors
from relax.training.config import SgdConfig
from relax.weights.digest import digest_of
from relax.weights.store import WeightStore
from tests.training.setting import LORA, LOSS, make_backend, make_model, make_rows, same_bits, train_steps, weights_of

ROWS = make_rows()


async def test_case_c1_the_engine_holds_the_merged_weights_of_a_lora_trainer() -> None:
    """After every publication: the digest of what the engine's plain model holds, tied head included, and its logprobs."""
    backend, store, engine = make_backend(config=LORA), WeightStore(), make_model(seed=9)
    for number in range(3):
        manifest = await store.publish(Version(0, number), backend.export())
        bind_tensors(engine, (await store.fetch(Version(0, number))).tensors)
        assert digest_of(published_tensors(engine)) == digest_of(backend.export()) == manifest.digest
        assert engine.lm_head.weight is engine.model.embed_tokens.weight
        ours = backend.logprobs([[tuple(ROWS)]])[0][0]
        theirs = make_backend(model=engine, config=LORA).logprobs([[tuple(ROWS)]])[0][0]
        assert max(abs(one - other).max() for one, other in zip(ours, theirs, strict=True)) <= 1e-5
        train_steps(backend, ROWS, 1, first=number)


def test_case_c2_the_published_weights_of_a_lora_run_change_with_every_step() -> None:
    backend = make_backend(config=LORA)
    before = weights_of(backend)
    train_steps(backend, ROWS, 1)
    after = weights_of(backend)
    adapted = [name for name in before if "proj" in name]
    assert all(not torch.equal(before[name], after[name]) for name in adapted)


@pytest.mark.parametrize("fault", ["lost", "tiny"])
def test_case_c2_a_lora_run_whose_published_weights_stay_fails(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter is left out of what is published, or its steps are too small for the base's numbers."""
    optimizer = SgdConfig(lr=1e-30 if fault == "tiny" else 0.1)
    backend = make_backend(config=LORA, optimizer=optimizer)
    if fault == "lost":
        monkeypatch.setattr("peft.tuners.lora.Linear.get_delta_weight", lambda self, adapter: torch.zeros(()))
    backend.export()
    train_steps(backend, ROWS, 2)
    with pytest.raises(InvariantError, match=r"2 steps of LoRA training changed none of the 14 adapted tensors"):
        backend.export()


def test_case_c2_no_step_no_change_no_alarm() -> None:
    """Exported twice, after a no-op, and after a step without a gradient: equal weights are right there."""
    backend = make_backend(config=LORA)
    first = weights_of(backend)
    backend.forward_backward([[()]], LOSS)
    backend.optim_step(0.0)
    assert same_bits(first, weights_of(backend))
    backend.forward_backward([[tuple(ROWS[6:8])]], LOSS)
    backend.optim_step(1.0)
    assert same_bits(first, weights_of(backend))
