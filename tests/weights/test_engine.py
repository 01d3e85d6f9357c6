"""The embedded engine on mapped weights: the same tokens as from memory, and its parameters are the file's pages."""

from pathlib import Path

import numpy as np

from relax.core.completion import frozen
from relax.core.version import Version
from relax.core.weight import Probe
from relax.model.name import published_tensors
from relax.weights.updater import EngineUpdater
from tests.cases.test_case_c_weights import updating
from tests.engines.setting import ask, forced, model_of, prompt, torch_engine
from tests.weights.setting import Node

PROBE_IDS = frozen(np.arange(1, 9, dtype=np.int32))


async def test_rule_ws6_an_engine_that_maps_versions_samples_what_one_in_process_samples(tmp_path: Path) -> None:
    node, expected, found = Node(tmp_path), [], []
    for number in range(2):
        async with torch_engine(number) as engine:
            expected.append(await ask(engine, prompt(6), forced(12)))
    async with torch_engine(None) as engine, updating(engine, node.reader()) as updater:  # type: ignore[arg-type]
        assert isinstance(updater, EngineUpdater)
        for number in range(2):
            probe = Probe(PROBE_IDS, frozen(np.zeros(8, np.float32)), tolerance=1e9)
            await node.writer.publish(Version(0, number), published_tensors(model_of(number)), probe)
            updater.notify(Version(0, number))
            await updater.wait_live(Version(0, number), 30)
            found.append(await ask(engine, prompt(6), forced(12)))
        assert updater.counters.loads == 2
        assert updater.counters.gap_max > 0, "the probe was computed"
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.logprobs, other.logprobs)
    assert not np.array_equal(found[0].token_ids, found[1].token_ids)


async def test_rule_ws2_a_swap_copies_no_weight(tmp_path: Path) -> None:
    node = Node(tmp_path)
    reader = node.reader()
    async with torch_engine(None) as engine:
        await node.writer.publish(Version(0, 0), published_tensors(model_of(0)))
        await engine.load(Version(0, 0), reader)
        held, mapped = published_tensors(engine._model), reader._kept[-1]
        assert all(held[name].data_ptr() == mapped[name].data_ptr() for name in held)
        await node.writer.publish(Version(0, 1), published_tensors(model_of(1)))
        await engine.pause("recompute")
        await engine.load(Version(0, 1), reader)
        assert len(reader._kept) == 2, "the version before is given back later, not while the engine is paused"
        await engine.resume()
