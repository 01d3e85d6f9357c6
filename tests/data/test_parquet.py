"""The `parquet` data set: rows as records, row groups, order, and what it refuses."""

import datetime
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relax.core.error import DataError
from relax.data import parquet
from relax.data.parquet import ParquetDataSet
from relax.data.quarantine import Quarantine
from relax.data.stream import PromptRules, read_prompts
from tests.data.toy import char_renderer, problems, source_config, stream_of, write_parquet

USER = {"role": "user", "content": "1+1="}


def config_of(path, **values):
    return source_config(type="parquet", path=str(path), **values)


def read(config, quarantine=None):
    return read_prompts(
        config, renderer=char_renderer(), rules=PromptRules(64), quarantine=quarantine or Quarantine(), seed=0
    )


@pytest.fixture
def loads(monkeypatch):
    """The numbers of the row groups that were read from disk, in order."""
    found = []
    load = ParquetDataSet._load

    def recorded(self, group):
        found.append(group.first)
        return load(self, group)

    monkeypatch.setattr(ParquetDataSet, "_load", recorded)
    return found


def test_rows_are_the_records_that_were_written_and_have_stable_numbers(tmp_path):
    write_parquet(tmp_path / "a.parquet", problems(10))
    write_parquet(tmp_path / "b.parquet", problems(3))
    prompts = read(config_of(tmp_path))
    assert [prompt.key.record for prompt in prompts] == list(range(13))
    assert [prompt.reference for prompt in prompts] == [str(i) for i in [*range(10), *range(3)]]
    dataset = ParquetDataSet(config_of(tmp_path / "*.parquet"))
    assert [dataset.location(index) for index in (0, 9, 10, 12)] == [
        "a.parquet:0",
        "a.parquet:9",
        "b.parquet:0",
        "b.parquet:2",
    ]
    with pytest.raises(IndexError):
        dataset.read(13)


def test_empty_files_and_row_groups_hold_no_record(tmp_path):
    write_parquet(tmp_path / "b.parquet", problems(2))
    schema = pa.schema([("prompt", pa.string()), ("reference", pa.string())])
    for name in ("a", "c"):
        pq.write_table(schema.empty_table(), tmp_path / f"{name}.parquet")
    assert [prompt.key.record for prompt in read(config_of(tmp_path))] == [0, 1]
    with pytest.raises(DataError, match="'toy' holds no record"):
        next(stream_of(config_of(tmp_path / "a.parquet")))


def test_columns_are_mapped_and_the_rest_is_metadata(tmp_path):
    records = [{"question": [USER], "answer": 2, "level": 3, "topic": "sums"}]
    config = config_of(write_parquet(tmp_path / "a.parquet", records), prompt_key="question", reference_key="answer")
    [prompt] = read(config)
    assert (prompt.messages[0].text, prompt.reference) == ("1+1=", "2")
    assert prompt.metadata == {"level": 3, "topic": "sums"}
    [prompt] = read(config.model_copy(update={"columns": ("level",)}))
    assert prompt.metadata == {"level": 3}


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"reference_key": "anwser"}, "'anwser'.*did you mean 'answer'"),
        ({"prompt_key": "problem", "reference_key": "answer"}, "'problem'"),
        ({"reference_key": "answer", "columns": ["level"]}, "'level'"),
        ({"fields": {"chosen": "good", "rejected": "bad"}}, "'good', 'bad'"),
    ],
)
def test_a_missing_column_is_named_with_those_that_exist(tmp_path, values, missing):
    path = write_parquet(tmp_path / "a.parquet", [{"prompt": "1", "answer": "1"}])
    with pytest.raises(DataError, match=rf"'toy': 'a\.parquet' has no column {missing}") as raised:
        read(config_of(path, **values))
    assert "it has prompt, answer" in str(raised.value)


def test_every_file_needs_the_columns(tmp_path):
    write_parquet(tmp_path / "a.parquet", problems(2))
    write_parquet(tmp_path / "b.parquet", [{"prompt": "1", "solution": "1"}])
    with pytest.raises(DataError, match=r"'b\.parquet' has no column 'reference'"):
        read(config_of(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, b"", "no data at"),
        ("data.csv", b"a,b\n", r"expected one of \.parquet"),
        ("a.parquet", b"PAR1 but not really", r"a\.parquet' is not a Parquet file"),
        ("a.parquet", b"", r"a\.parquet' is not a Parquet file"),
    ],
)
def test_files_that_cannot_be_read_are_errors(tmp_path, name, content, message):
    if name is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(config_of(tmp_path / (name or "none.parquet")))


def test_a_bad_row_is_quarantined_with_its_place_and_the_rest_is_used(tmp_path):
    records = [*problems(3), {"prompt": "", "reference": "1"}, {"prompt": "5", "reference": None}]
    quarantine = Quarantine(tmp_path / "quarantine.jsonl")
    assert len(read(config_of(write_parquet(tmp_path / "a.parquet", records)), quarantine)) == 3
    assert quarantine.reasons("toy") == {"empty prompt": 1, "missing field": 1}
    assert '"line": "a.parquet:3"' in (tmp_path / "quarantine.jsonl").read_text()


def test_a_value_without_json_form_names_its_column_which_can_be_left_out(tmp_path):
    records = [{"prompt": "1", "reference": "1", "when": datetime.datetime(2026, 1, 1)}]
    config = config_of(write_parquet(tmp_path / "a.parquet", records))
    with pytest.raises(DataError, match=r"1 x mistyped field .*'when'"):
        read(config)
    assert len(read(config.model_copy(update={"columns": ()}))) == 1


def test_text_that_is_no_utf_8_is_quarantined_alone(tmp_path):
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"1\xff")]
    )
    pq.write_table(pa.table({"prompt": broken, "reference": ["1", "2"]}), tmp_path / "a.parquet")
    quarantine = Quarantine()
    assert [prompt.key.record for prompt in read(config_of(tmp_path / "a.parquet"), quarantine)] == [0]
    assert quarantine.reasons("toy") == {"unreadable value": 1}


def test_a_damaged_row_group_is_quarantined_and_the_others_are_used(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", problems(12))
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 20] = b"\xff" * 20
    path.write_bytes(content)
    quarantine = Quarantine()
    assert [prompt.key.record for prompt in read(config_of(path), quarantine)] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert quarantine.reasons("toy") == {"unreadable row group": 4}


def test_a_file_that_changes_under_the_run_is_an_error(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", problems(12))
    stream = stream_of(config_of(path, shuffle=False))
    next(stream)
    write_parquet(path, problems(13))
    with pytest.raises(DataError, match=r"a\.parquet' changed while it is in use"):
        [next(stream) for _ in range(12)]


def test_each_row_group_is_read_once_in_a_pass_and_few_are_held(tmp_path, monkeypatch, loads):
    path = write_parquet(tmp_path / "a.parquet", problems(48))
    size = pq.ParquetFile(path).metadata.row_group(0).total_byte_size
    monkeypatch.setattr(parquet, "WINDOW_BYTES", 3 * size + size // 2)
    dataset = ParquetDataSet(config_of(path))
    order = dataset.order(7)
    assert sorted(order) == list(range(48))
    held = []
    for index in order:
        assert dataset.read(int(index))["reference"] == str(index)
        held.append(len(dataset._held))
    assert sorted(loads) == list(range(0, 48, 4))
    assert max(held) == 3
    window = [int(index) // 4 for index in order[:12]]
    assert len(set(window)) == 3
    assert sum(a != b for a, b in pairwise(window)) > 2, "records of a window are mixed"


def test_the_order_of_a_large_data_set_depends_on_seed_and_pass_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "WINDOW_BYTES", 1)
    config = config_of(write_parquet(tmp_path / "a.parquet", problems(20)))
    stream = stream_of(config)
    keys = [next(stream).key for _ in range(7)]
    state = stream.state()
    rest = [next(stream).key for _ in range(33)]
    resumed = stream_of(config)
    resumed.restore(state)
    assert [next(resumed).key for _ in range(33)] == rest
    first, second = [key.record for key in [*keys, *rest[:13]]], [key.record for key in rest[13:]]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert [next(other).key for other in [stream_of(config, seed=1)] for _ in range(7)] != keys


def test_a_data_set_that_fits_is_shuffled_as_a_whole_like_any_other(tmp_path):
    config = config_of(write_parquet(tmp_path / "a.parquet", problems(20)))
    generated = source_config(type="generator", function="tests.data.toy:numbered", args={"count": 20})
    streams = stream_of(config), stream_of(generated)
    a, b = ([next(stream).key.record for _ in range(20)] for stream in streams)
    assert a == b
