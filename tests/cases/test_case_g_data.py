"""Cases of section G (data), and F3 as far as records are concerned."""

import json
import math

import pytest
from pydantic import ValidationError

from relax.core.error import DataError
from relax.data.mixture import Mixture
from relax.data.quarantine import Quarantine
from relax.data.stream import PromptRules, read_prompts
from tests.data.toy import (
    bpe_tokenizer,
    char_renderer,
    problems,
    renderer_of,
    source_config,
    stream_of,
    write_lines,
    write_parquet,
)


def read(config, quarantine=None, renderer=None, **options):
    return read_prompts(
        config,
        renderer=renderer or char_renderer(),
        rules=PromptRules(64),
        quarantine=quarantine or Quarantine(),
        **options,
    )


def columnar(kind, folder, records, **values):
    """Records stored in columns, by `kind` of source."""
    if kind == "parquet":
        return source_config(type=kind, path=str(write_parquet(folder / "a.parquet", records)), **values)
    import datasets

    keys = list(dict.fromkeys(key for record in records for key in record))
    datasets.Dataset.from_list([{key: record.get(key) for key in keys} for record in records]).save_to_disk(
        folder / "saved"
    )
    return source_config(type=kind, path=str(folder / "saved"), **values)


IMAGE = {"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What?"}]}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_case_g1_what_is_refused_in_between_changes_no_order(tmp_path, kind):
    """Mixed with images, which a text model cannot read, the text keeps its order and its numbers."""
    text = [{"role": "user", "content": [{"type": "text", "text": f"{number}+0="}]} for number in range(9)]
    records = [
        {"messages": [IMAGE if number % 3 == 1 else text[number]], "reference": str(number)} for number in range(9)
    ]
    write = {"jsonl": lambda path: write_lines(path, *records), "parquet": lambda path: write_parquet(path, records)}
    config = source_config(type=kind, path=str(write[kind](tmp_path / f"a.{kind}")), shuffle=False)
    quarantine = Quarantine()
    prompts = read(config, quarantine)
    assert [prompt.key.record for prompt in prompts] == [0, 2, 3, 5, 6, 8]
    assert [prompt.messages[0].text for prompt in prompts] == [f"{number}+0=" for number in (0, 2, 3, 5, 6, 8)]
    assert quarantine.reasons("toy") == {"text only": 3}
    stream = stream_of(config)
    assert [next(stream).key.record for _ in range(8)] == [0, 2, 3, 5, 6, 8, 0, 2]


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_case_g3_columns_add_no_keys_to_records_and_lose_none(tmp_path, kind):
    """A struct of columns has the keys of all rows: those of other rows come back as null, also in messages."""
    records = [
        {"messages": [{"role": "user", "content": "1"}], "reference": "1", "extra_info": {"a": 1}},
        {
            "messages": [{"role": "user", "content": "2", "name": None}, *[{"role": "tool", "content": "3"}] * 2],
            "reference": "2",
            "extra_info": {"b": {"c": [1, None], "d": None}},
            "level": 7,
        },
        {"messages": [{"role": "user", "content": "3"}], "reference": "3", "extra_info": None},
        {"messages": [{"role": "user", "content": "4"}], "reference": "4", "extra_info": {"b": {"d": 2.0}}},
    ]
    prompts = read(columnar(kind, tmp_path, records))
    assert [prompt.metadata for prompt in prompts] == [
        {"a": 1},
        {"b": {"c": [1, None]}, "level": 7},
        {},
        {"b": {"d": 2.0}},
    ]
    assert [len(prompt.messages) for prompt in prompts] == [1, 3, 1, 1]


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_case_g3_nan_and_null_in_columns_are_absent(tmp_path, kind):
    records = [
        {"prompt": "1", "reference": 1.5, "extra_info": {"score": math.nan}},
        {"prompt": "2", "reference": math.nan, "extra_info": {"score": 1.0}},
        {"prompt": "3", "reference": None, "extra_info": {"score": 1.0}},
        {"prompt": None, "reference": 1.0, "extra_info": {"score": 1.0}},
    ]
    quarantine = Quarantine()
    [prompt] = read(columnar(kind, tmp_path, records, reference_type="number"), quarantine)
    assert (prompt.reference, prompt.metadata) == (1.5, {"score": None})
    assert quarantine.reasons("toy") == {"missing field": 3}


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_case_g3_a_key_that_the_file_lost_is_told_at_the_start(tmp_path, kind):
    """A writer that takes its columns from the first row drops the others: the source says what is left."""
    config = columnar(kind, tmp_path, [{"prompt": "1"}, {"prompt": "2"}])
    with pytest.raises(DataError, match=r"'toy': .* has no column 'reference'; it has prompt;"):
        read(config)


@pytest.mark.parametrize("line", ["{}", '{"extra_info": null}', '{"extra_info": NaN}'])
def test_case_g3_no_extra_info_is_an_empty_mapping(tmp_path, line):
    value = line.replace("{", '{"prompt": "1", "reference": "1", ').replace(", }", "}")
    [prompt] = read(source_config(path=str(write_lines(tmp_path / "a.jsonl", value))))
    assert prompt.metadata == {}


def test_case_g3_keys_of_one_record_do_not_leak_into_another(tmp_path):
    lines = [{"prompt": "1", "reference": "1", "a": 1}, {"prompt": "2", "reference": "2", "b": {"c": 2}}]
    prompts = read(source_config(path=str(write_lines(tmp_path / "a.jsonl", *lines))))
    assert [prompt.metadata for prompt in prompts] == [{"a": 1}, {"b": {"c": 2}}]


@pytest.mark.parametrize(
    "given", ["set/a.jsonl", "set/b.json", "set/c.json", "set", "set/*", "s*/[ab].json*", "**/*.json*"]
)
def test_case_g5_json_and_jsonl_files_folders_and_patterns(tmp_path, given):
    folder = tmp_path / "set"
    folder.mkdir()
    records = problems(6)
    write_lines(folder / "a.jsonl", *records[:2])
    (folder / "b.json").write_text(json.dumps(records[2:4], indent=2))
    write_lines(folder / "c.json", *records[4:])
    expected = {"set/a.jsonl": "01", "set/b.json": "23", "set/c.json": "45", "s*/[ab].json*": "0123"}
    prompts = read(source_config(path=str(tmp_path / given)))
    assert "".join(prompt.reference for prompt in prompts) == expected.get(given, "012345")
    assert [prompt.key.record for prompt in prompts] == list(range(len(prompts)))


@pytest.mark.parametrize(
    "given", ["set", "set/*.parquet", "**/*.parquet", "set/a.parquet"], ids=["folder", "pattern", "deep", "file"]
)
def test_case_g5_parquet_files_folders_and_patterns(tmp_path, given):
    (tmp_path / "set").mkdir()
    for name, records in (("b", problems(4)[2:]), ("a", problems(2))):
        write_parquet(tmp_path / "set" / f"{name}.parquet", records)
    (tmp_path / "set" / "_SUCCESS").write_text("")
    prompts = read(source_config(type="parquet", path=str(tmp_path / given)))
    assert "".join(prompt.reference for prompt in prompts) == ("01" if given.endswith("a.parquet") else "0123")


def test_case_g6_a_source_smaller_than_its_share_goes_round_on_its_own(tmp_path):
    """One record beside seven, at equal weights: each goes through its passes, and no prompt comes twice."""
    configs = [
        source_config(name=name, path=str(write_lines(tmp_path / f"{name}.jsonl", *problems(count))))
        for name, count in (("one", 1), ("seven", 7))
    ]
    mixture = Mixture({config.name: stream_of(config) for config in configs}, {"one": 1, "seven": 1})
    keys = [next(mixture).key for _ in range(28)]
    assert [key.pass_number for key in keys if key.source == "one"] == list(range(14))
    assert [key.pass_number for key in keys if key.source == "seven"] == [0] * 7 + [1] * 7
    assert len(set(keys)) == 28


def test_case_g6_a_data_set_smaller_than_a_batch_goes_round(tmp_path):
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", *problems(3))))
    stream = stream_of(config)
    batch = [next(stream).key for _ in range(8)]
    assert len(set(batch)) == 8
    assert [key.pass_number for key in batch] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert len(read(config, max_records=10)) == 3


def test_case_g8_an_unknown_source_key_is_refused():
    with pytest.raises(ValidationError, match="reference_kee"):
        source_config(path="a.jsonl", reference_kee="answer")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "parquet", "path": "a.parquet", "colums": ["a"]}, "colums"),
        ({"type": "datasets", "path": "a", "splt": "train"}, "splt"),
        ({"type": "reasoning_gym", "dataset": "leg_counting", "sise": 3}, "sise"),
        ({"path": "a.jsonl", "max_samples": 3}, "max_samples"),
    ],
)
def test_case_g8_no_source_ignores_a_key(values, message):
    with pytest.raises(ValidationError, match=message):
        source_config(**values)


def test_case_g8_a_mapped_key_that_no_record_has_is_told_with_a_suggestion(tmp_path):
    lines = [{"prompt": "1", "answer": "1"}, {"prompt": "2", "answer": "2"}]
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", *lines)), reference_key="anwser")
    with pytest.raises(DataError, match=r"2 x missing field .*did you mean 'answer'"):
        read(config)


def test_case_g9_typed_handling_of_prompt_and_label(tmp_path):
    lines = [
        {"prompt": "1", "reference": 7},
        {"prompt": "2", "reference": "7 km"},
        {"prompt": "3"},
        {"reference": "7"},
        {"prompt": "5", "reference": True},
        {"prompt": "6", "reference": [7]},
    ]
    path = str(write_lines(tmp_path / "a.jsonl", *lines))
    quarantine = Quarantine()
    assert [p.reference for p in read(source_config(path=path), quarantine)] == ["7", "7 km"]
    assert quarantine.reasons("toy") == {"missing field": 2, "mistyped reference": 2}
    assert [p.reference for p in read(source_config(path=path, reference_type="number"))] == [7]
    assert [p.reference for p in read(source_config(path=path, reference_type="json"))] == [7, "7 km", True, [7]]


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
def test_case_g9_labels_keep_the_type_of_their_column(tmp_path, kind):
    records = [{"prompt": "1", "reference": 7}, {"prompt": "2", "reference": None}]
    assert [p.reference for p in read(columnar(kind, tmp_path, records))] == ["7"]
    (tmp_path / "numbers").mkdir()
    config = columnar(kind, tmp_path / "numbers", records, reference_type="number")
    [prompt] = read(config)
    assert (prompt.reference, type(prompt.reference)) == (7, int)


def test_case_g9_characters_that_the_tokenizer_drops_are_refused(tmp_path):
    lines = [*problems(1), {"prompt": "7×5=", "reference": "35"}]
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", *lines)))
    quarantine = Quarantine(tmp_path / "quarantine.jsonl")
    assert len(read(config, quarantine)) == 1
    entry = json.loads((tmp_path / "quarantine.jsonl").read_text())
    assert entry["reason"] == "unencodable text: the tokenizer has no tokens for '×'"
    assert len(read(config, renderer=renderer_of(bpe_tokenizer(), stops=("<|im_end|>",)))) == 2


def test_case_f3_a_text_record_with_the_words_of_an_image_is_ordinary(tmp_path):
    text = "What does <image> or <|image_pad|> mean in HTML?"
    config = source_config(path=str(write_lines(tmp_path / "a.jsonl", {"prompt": text, "reference": "1"})))
    [prompt] = read(config)
    assert prompt.messages[0].text == text
    renderer = char_renderer()
    ids = renderer.encode(prompt.messages).token_ids
    assert text in renderer.decode(ids)
