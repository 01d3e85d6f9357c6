"""Name maps: what another engine holds is, by rules, what was published; and the way back finds whatever was left out (C1)."""

import pytest
import torch

from relax.core.error import TransportError
from relax.model.name import published_tensors, tensor_specs
from relax.model.name_map import FUSED, Join, NameMap, Rename, Stack, Tie, Unstack
from relax.weights.digest import digest_of
from tests.training.setting import make_model


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_case_c1_fused_projections_of_a_whole_model_come_back_by_digest() -> None:
    published = published_tensors(make_model(seed=1))
    held = FUSED.to_engine(published)
    q, k, v = (published[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    assert torch.equal(held["model.layers.1.self_attn.qkv_proj.weight"], torch.cat([q, k, v]))
    assert not any("q_proj" in name or ("up_proj" in name and "gate_up" not in name) for name in held)
    assert digest_of(FUSED.to_trainer(held, tensor_specs(published))) == digest_of(published)
    held["model.layers.0.self_attn.qkv_proj.weight"][-1, -1] += 1
    assert digest_of(FUSED.to_trainer(held, tensor_specs(published))) != digest_of(published)


EXPERTS = NameMap((Stack("mlp.experts.{expert}.up.{kind}", "mlp.experts.up_{kind}"),))


def test_case_c1_experts_are_stacked_by_number_not_by_name() -> None:
    published = {f"mlp.experts.{index}.up.weight": torch.full((2, 3), float(index)) for index in range(12)}
    held = EXPERTS.to_engine(published)
    assert list(held) == ["mlp.experts.up_weight"]
    assert held["mlp.experts.up_weight"][:, 0, 0].tolist() == [float(index) for index in range(12)]
    assert same(EXPERTS.to_trainer(held, tensor_specs(published)), dict(sorted(published.items())))


def test_case_c1_experts_that_are_one_tensor_here_are_given_out_by_number() -> None:
    names = NameMap((Unstack("layers.{layer}.experts.down", "layers.{layer}.experts.{expert}.down.weight"),))
    published = {f"layers.{layer}.experts.down": torch.randn(3, 2, 4) for layer in range(2)}
    held = names.to_engine(published)
    assert len(held) == 6
    assert torch.equal(held["layers.1.experts.2.down.weight"], published["layers.1.experts.down"][2])
    assert same(names.to_trainer(held, tensor_specs(published)), published)


def test_case_c1_a_tied_head_is_the_embedding_and_a_broken_tie_is_found() -> None:
    names = NameMap((Rename("embed.weight", "tokens.weight"), Tie("lm_head.weight", "tokens.weight")))
    published = {"embed.weight": torch.randn(5, 2), "norm": torch.ones(2)}
    held = names.to_engine(published)
    assert sorted(held) == ["lm_head.weight", "norm", "tokens.weight"]
    assert held["lm_head.weight"] is held["tokens.weight"]
    assert same(names.to_trainer(held, tensor_specs(published)), published)
    held["lm_head.weight"] = held["lm_head.weight"] + 1
    with pytest.raises(TransportError, match=r"'lm_head\.weight' is not its 'tokens\.weight' any more"):
        names.to_trainer(held, tensor_specs(published))


@pytest.mark.parametrize(
    ("names", "published", "message"),
    [
        (FUSED, {"model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}, "number 1 is missing"),
        (EXPERTS, {"mlp.experts.1.up.weight": torch.ones(2)}, "number 0 is missing"),
        (NameMap((Rename("a", "b"),)), {"a": torch.ones(1), "b": torch.ones(1)}, "two tensors became 'b'"),
        (NameMap((Tie("head", "embed"),)), {"a": torch.ones(1)}, "'embed', which was not published"),
    ],
)
def test_rule_ws3_a_map_that_does_not_fit_says_what_is_missing(
    names: NameMap, published: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(TransportError, match=message):
        names.to_engine(published)


def test_rule_ws3_an_engine_that_holds_less_or_other_shapes_is_refused() -> None:
    names = NameMap((Join(("q", "k"), "qk"),))
    specs = tensor_specs({"q": torch.ones(2), "k": torch.ones(3)})
    for held, message in (({}, "no tensor 'qk'"), ({"qk": torch.ones(4, 2, 2)}, "split|shapes")):
        with pytest.raises((TransportError, RuntimeError), match=message):
            names.to_trainer(held, specs)
    stacked = tensor_specs({"mlp.experts.0.up.weight": torch.ones(2)})
    with pytest.raises(TransportError, match="have shapes"):
        EXPERTS.to_trainer({"mlp.experts.up_weight": torch.ones(1, 3)}, stacked)
