"""The `datasets` data set: saved folders, loadable folders and files, splits, undecoded media, and what it refuses."""

import json

import datasets
import pyarrow as pa
import pytest

from relax.core.error import DataError
from relax.data.huggingface import HuggingFaceDataSet
from relax.data.quarantine import Quarantine
from relax.data.stream import PromptRules, read_prompts
from tests.data.toy import char_renderer, problems, source_config, stream_of, write_lines

RECORDS = problems(5)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def config_of(path, **values):
    return source_config(type="datasets", path=str(path), **values)


def read(config, quarantine=None):
    return read_prompts(
        config, renderer=char_renderer(), rules=PromptRules(64), quarantine=quarantine or Quarantine(), seed=0
    )


def references(config):
    return [prompt.reference for prompt in read(config)]


@pytest.fixture
def saved(tmp_path):
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def splits(tmp_path):
    train, test = (datasets.Dataset.from_list(part) for part in (RECORDS[:3], RECORDS[3:]))
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "splits")
    return tmp_path / "splits"


def test_a_saved_data_set(saved):
    assert references(config_of(saved)) == list("01234")
    assert HuggingFaceDataSet(config_of(saved)).location(3) == "row 3"


def test_a_split_of_several(splits):
    assert references(config_of(splits, split="train")) == list("012")
    assert references(config_of(splits, split="test")) == list("34")


@pytest.mark.parametrize(("split", "message"), [(None, "no `split` is given"), ("dev", "no split 'dev'")])
def test_splits_are_named_when_none_is_chosen(splits, split, message):
    with pytest.raises(DataError, match=rf"'toy': .*{message}.*has the splits train, test"):
        read(config_of(splits, split=split))


def test_a_split_of_a_data_set_without_any_is_refused(saved):
    with pytest.raises(DataError, match="without splits; leave out `split`"):
        read(config_of(saved, split="train"))


@pytest.mark.parametrize("given", ["folder", "folder/part.jsonl"])
def test_a_folder_and_a_file_that_the_library_reads(tmp_path, given):
    (tmp_path / "folder").mkdir()
    write_lines(tmp_path / "folder" / "part.jsonl", *RECORDS)
    assert references(config_of(tmp_path / given)) == list("01234")


def test_chosen_files_of_a_folder(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,reference\n1+1=,2\n")
    write_lines(tmp_path / "b.jsonl", *RECORDS)
    assert references(config_of(tmp_path, data_files=["a.csv"])) == ["2"]
    assert references(config_of(tmp_path, data_files=["*.jsonl"])) == list("01234")


@pytest.mark.parametrize("path", ["./nothing", "/nothing/here", "a/b/c"])
def test_a_path_without_data_is_an_error(path):
    with pytest.raises(DataError, match=rf"'toy': there is no file or folder '{path}'"):
        read(config_of(path))


@pytest.mark.parametrize("path", ["nobody/nothing", "nothing"])
def test_a_hub_name_without_a_hub_is_told_with_what_to_do(path):
    with pytest.raises(DataError, match=rf"cannot load '{path}'.*the hub cannot be reached.*save_to_disk"):
        read(config_of(path))


def test_what_the_library_cannot_read_is_an_error_of_the_source(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "refe\n')
    with pytest.raises(DataError, match=r"'toy': cannot load .*JSON parse error.*mend it"):
        read(config_of(tmp_path))


def test_a_missing_column_is_named_with_those_that_exist(saved):
    with pytest.raises(
        DataError, match=r"has no column 'references'; it has prompt, reference \(did you mean 'reference'"
    ):
        read(config_of(saved, reference_key="references"))


def test_media_columns_are_never_decoded_and_can_be_left_out(tmp_path):
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "reference": datasets.Value("string"),
            "sound": datasets.Audio(),
            "picture": datasets.Image(),
        }
    )
    media = {"bytes": b"no sound and no picture at all", "path": None}
    record = {"prompt": "1", "reference": "1", "sound": media, "picture": media}
    stored = datasets.Dataset(pa.Table.from_pylist([record], schema=features.arrow_schema))
    assert isinstance(stored.features["sound"], datasets.Audio)
    stored.save_to_disk(tmp_path / "saved")
    config = config_of(tmp_path / "saved")
    assert HuggingFaceDataSet(config).read(0)["sound"] == {"bytes": media["bytes"]}
    with pytest.raises(DataError, match=r"1 x mistyped field .*'sound': a bytes is not a JSON value"):
        read(config)
    assert read(config.model_copy(update={"columns": ()}))[0].reference == "1"


def test_the_digest_is_that_of_the_rows_that_are_read(saved, tmp_path):
    same = HuggingFaceDataSet(config_of(saved)).digest
    datasets.Dataset.from_list([{**record, "level": 1} for record in RECORDS]).save_to_disk(tmp_path / "more")
    datasets.Dataset.from_list(RECORDS[::-1]).save_to_disk(tmp_path / "turned")
    datasets.Dataset.from_list(RECORDS * 2).select(range(5)).save_to_disk(tmp_path / "copied")
    more = config_of(tmp_path / "more")
    assert HuggingFaceDataSet(more).digest != same
    assert HuggingFaceDataSet(more.model_copy(update={"columns": ()})).digest == same
    assert HuggingFaceDataSet(config_of(tmp_path / "turned")).digest != same
    assert HuggingFaceDataSet(config_of(tmp_path / "copied")).digest == same


def test_a_changed_folder_is_seen_by_a_resumed_run(tmp_path):
    (tmp_path / "folder").mkdir()
    path = write_lines(tmp_path / "folder" / "part.jsonl", *RECORDS)
    config = config_of(tmp_path / "folder")
    state = json.loads(json.dumps(stream_of(config).state()))
    stream_of(config).restore(state)
    write_lines(path, *problems(4), {"prompt": "9+0=", "reference": "9"})
    with pytest.raises(DataError, match="the content"):
        stream_of(config).restore(state)
