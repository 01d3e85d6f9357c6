"""Two processes that train one model together, each with rows of other media; run by `test_media_rank`."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from relax.core.batch import MicroBatch
from relax.training.encoder import Encoders
from relax.training.forward import Policy
from relax.training.padding import pad_batch
from tests.training.media_setting import OMNI, VL, family_of, make_media_row, make_model, vocabulary_of

CPU = torch.device("cpu")
HANG_S = 20
"""Long enough for two slow processes to meet; after it a collective that only one of them runs is an error."""


def plans(kind: str) -> list[list[MicroBatch]]:
    """Micro-batches of each rank, in rounds that both run: text beside image, image beside nothing, mixed beside text."""
    text = [make_media_row(kind, index) for index in range(2)]
    image = make_media_row(kind, 4, [("image", 1)])
    mixed = make_media_row(
        kind, 5, [("video", 2), ("image", 3), ("audio", 5)] if kind == OMNI else [("video", 2), ("image", 3)]
    )
    return [[(text[0],), (), (mixed, text[1])], [(image,), (image,), (text[1],)]]


def make_policy(kind: str, on_every_rank: bool) -> Policy:
    encoders = Encoders(family_of(kind), on_every_rank=on_every_rank)
    return Policy(make_model(kind), torch.tensor(vocabulary_of(kind).allowed), 1.0, encoders)


def run_rounds(policy: Callable[..., Any], kind: str, batches: list[MicroBatch]) -> list[torch.Tensor]:
    """Logprobs of every round, without gradients; then gradients, which add up."""
    padded = [pad_batch(batch, ("advantages",), vocabulary_of(kind).pad_id, CPU) for batch in batches]
    with torch.no_grad():
        found: list[torch.Tensor] = [policy(one)[0] for one in padded]
    for one in padded:
        logprobs_BT = policy(one)[0]
        (-(one.weights_BT * one.columns["advantages"] * logprobs_BT).sum()).backward()
    return found


def shard(policy: Policy) -> Any:
    """FSDP2 around every layer of encoders and language model, and around all of it."""
    model = policy.model.model
    for layer in [*model.language_model.layers, *model.visual.blocks]:
        fully_shard(layer)
    return fully_shard(policy)


def replicate(policy: Policy) -> Any:
    return DistributedDataParallel(policy)


WAYS: dict[str, tuple[str, Callable[[Policy], Any]]] = {"shard": (VL, shard), "replicate": (OMNI, replicate)}


def run_rank(rank: int, folder: str, on_every_rank: bool) -> None:
    """Writes what rank `rank` found each way into `folder`; gradients times the number of ranks, since both ways take a mean."""
    torch.set_num_threads(1)
    meeting = f"file://{Path(folder) / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=HANG_S))
    try:
        for name, (kind, spread) in WAYS.items():
            policy = make_policy(kind, on_every_rank)
            logprobs = run_rounds(spread(policy), kind, plans(kind)[rank])
            torch.save({"logprobs": logprobs, "gradients": gradients(policy)}, Path(folder) / f"{name}-{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    found = {name: one.grad for name, one in policy.named_parameters() if one.grad is not None}
    return {name: 2 * (one.full_tensor() if isinstance(one, DTensor) else one) for name, one in found.items()}
