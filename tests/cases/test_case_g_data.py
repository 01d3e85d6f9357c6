"""Cases of section G (data), and F3 as far as records are concerned."""

import json

import pytest
from pydantic import ValidationError

from relax.core.error import DataError
from relax.data.quarantine import Quarantine
from relax.data.stream import PromptRules, read_prompts
from tests.data.toy import bpe_tokenizer, char_renderer, problems, renderer_of, source_config, stream_of, write_lines


def read(config, quarantine=None, renderer=None, **options):
    return read_prompts(
        config,
        renderer=renderer or char_renderer(),
        rules=PromptRules(64),
        quarantine=quarantine or Quarantine(),
        **options,
    )


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
