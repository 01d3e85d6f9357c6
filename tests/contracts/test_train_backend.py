"""What every training backend does, the emulated one included."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax.core.batch import ForwardBackward
from relax.core.error import InvariantError, UserError
from relax.core.protocol import TrainBackend
from relax.training.config import EmulatedConfig
from relax.training.emulated import EmulatedBackend
from relax.training.packing import pack, split
from tests.training import media_setting
from tests.training.setting import (
    ADAMW,
    CONSTANT,
    LORA,
    LOSS,
    make_backend,
    make_rows,
    same_bits,
    total_weight,
    weights_of,
)

ROWS = make_rows()


def emulated() -> TrainBackend:
    backend = EmulatedBackend(EmulatedConfig(), model=None, vocabulary=None, temperature=1.0, grad_clip=1.0)
    backend.begin(ADAMW, CONSTANT, 100)
    return backend


def adapter() -> TrainBackend:
    return make_backend(config=LORA)


def reader() -> TrainBackend:
    """Over a model that reads media; the rows of this suite are text."""
    return media_setting.make_backend()


@pytest.fixture(params=[make_backend, adapter, reader, emulated], ids=["torch", "lora", "media", "emulated"])
def make(request: pytest.FixtureRequest) -> Callable[[], TrainBackend]:
    return request.param


@pytest.fixture
def backend(make: Callable[[], TrainBackend]) -> TrainBackend:
    return make()


def test_forward_backward_reports_sums(backend: TrainBackend) -> None:
    report = backend.forward_backward(split(pack(ROWS, 40), backend.num_replicas), LOSS)
    assert isinstance(report, ForwardBackward)
    assert report.weight == pytest.approx(total_weight(ROWS), rel=1e-6)
    assert report.tokens == sum(int(row.mask.sum()) for row in ROWS)
    assert report.measures["training/tokens/forward"].value == sum(len(row) for row in ROWS)
    assert report.finite


def test_empty_lists_and_micro_batches_are_zero(backend: TrainBackend) -> None:
    for shards in ([[] for _ in range(backend.num_replicas)], [[()] for _ in range(backend.num_replicas)]):
        report = backend.forward_backward(shards, LOSS)
        assert (report.loss, report.weight, report.tokens, report.finite) == (0.0, 0.0, 0, True)


def test_a_wrong_number_of_shards_is_refused(backend: TrainBackend) -> None:
    shards: list[Any] = [[] for _ in range(backend.num_replicas + 1)]
    with pytest.raises(InvariantError, match=r"\[TQ9\]"):
        backend.forward_backward(shards, LOSS)
    with pytest.raises(InvariantError, match=r"\[TQ9\]"):
        backend.logprobs(shards)


def test_a_step_changes_what_is_exported_and_a_no_op_does_not(backend: TrainBackend) -> None:
    before = weights_of(backend)
    backend.forward_backward(split(pack(ROWS, 40), backend.num_replicas), LOSS)
    assert backend.optim_step(total_weight(ROWS)).applied
    after = weights_of(backend)
    assert not same_bits(before, after)
    backend.forward_backward([[()] for _ in range(backend.num_replicas)], LOSS)
    report = backend.optim_step(0.0)
    assert (report.applied, report.finite) == (False, True)
    assert same_bits(after, weights_of(backend))


def test_the_exported_names_are_sorted_and_stay(backend: TrainBackend) -> None:
    first = list(backend.export())
    backend.forward_backward(split(pack(ROWS, 40), backend.num_replicas), LOSS)
    backend.optim_step(total_weight(ROWS))
    assert first == sorted(first) == list(backend.export())


def test_logprobs_mirror_the_shards(backend: TrainBackend) -> None:
    shards = split([*pack(ROWS, 40), ()], backend.num_replicas)
    answers = backend.logprobs(shards)
    assert [[len(batch) for batch in shard] for shard in shards] == [[len(one) for one in shard] for shard in answers]
    for shard, shard_answers in zip(shards, answers, strict=True):
        for batch, batch_answers in zip(shard, shard_answers, strict=True):
            for row, logprobs in zip(batch, batch_answers, strict=True):
                assert logprobs.shape == (len(row),)
                assert logprobs.dtype == np.float32
                assert not logprobs[~row.mask].any()
                assert not logprobs.flags.writeable


def test_a_capture_is_loaded_as_it_was(make: Callable[[], TrainBackend], tmp_path: Path) -> None:
    saved, loaded = make(), make()
    saved.forward_backward(split(pack(ROWS, 40), saved.num_replicas), LOSS)
    saved.optim_step(total_weight(ROWS))
    captured, expected = saved.capture(), weights_of(saved)
    saved.forward_backward(split(pack(ROWS, 40), saved.num_replicas), LOSS)
    saved.optim_step(total_weight(ROWS))
    captured.write(str(tmp_path / "new" / "folder"))
    assert not same_bits(expected, weights_of(loaded))
    loaded.load(str(tmp_path / "new" / "folder"))
    assert same_bits(expected, weights_of(loaded))
    assert not same_bits(expected, weights_of(saved)), "training went on"


def test_load_from_an_empty_folder_is_refused(backend: TrainBackend, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no usable training state"):
        backend.load(str(tmp_path))


def test_a_senseless_normalizer_is_refused(backend: TrainBackend) -> None:
    for normalizer in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvariantError, match=r"\[LO2\]"):
            backend.optim_step(normalizer)


def test_begin_may_be_called_again(backend: TrainBackend) -> None:
    before = weights_of(backend)
    backend.begin(ADAMW, CONSTANT, 10)
    assert same_bits(before, weights_of(backend))
    backend.forward_backward(split(pack(ROWS, 40), backend.num_replicas), LOSS)
    assert backend.optim_step(total_weight(ROWS)).applied


# --- rows with media, for backends whose model reads them ---


def media_adapter() -> TrainBackend:
    return media_setting.make_backend(media_setting.OMNI, config=LORA)


def hearing_reader() -> TrainBackend:
    return media_setting.make_backend(media_setting.OMNI)


@pytest.mark.parametrize("make_reader", [hearing_reader, media_adapter], ids=["torch", "lora"])
def test_rows_of_text_and_media_are_trained_together(make_reader: Callable[[], TrainBackend], tmp_path: Path) -> None:
    rows = media_setting.make_media_rows(media_setting.OMNI)
    backend, loaded = make_reader(), make_reader()
    shards = split([*pack(rows, 300), ()], backend.num_replicas)
    before = weights_of(backend)
    report = backend.forward_backward(shards, LOSS)
    assert report.weight == pytest.approx(total_weight(rows), rel=1e-6)
    forward = report.measures["training/tokens/forward"].value
    assert 0 < forward <= sum(len(row) for row in rows), "siblings may share the tokens of their prompt"
    assert backend.optim_step(report.weight).applied
    after = weights_of(backend)
    assert not same_bits(before, after)
    backend.capture().write(str(tmp_path))
    loaded.load(str(tmp_path))
    assert same_bits(after, weights_of(loaded))
    for batch, answers, again in zip(shards[0], backend.logprobs(shards)[0], loaded.logprobs(shards)[0], strict=True):
        for row, logprobs, other in zip(batch, answers, again, strict=True):
            assert logprobs.shape == (len(row),)
            assert not logprobs[~row.mask].any()
            assert np.all(logprobs[row.mask] < 0)
            assert np.array_equal(logprobs, other)
