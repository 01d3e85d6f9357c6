"""The recipes for real multimodal models, which nothing here can run: the tree, the form of the data sets, and the models' published
sizes on the meta device. No network: configurations are written here as the hub has them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax.config.load import load_config
from relax.config.tree import RunConfig, source_node, warnings_of
from relax.core.error import ConfigError
from relax.services.check import check_run

ROOT = Path(__file__).resolve().parents[2]
LARGE = ("qwen3-omni-30b", "qwen3-vl-4b")
TOKENS = {
    151652: "<|vision_start|>", 151653: "<|vision_end|>", 151655: "<|image_pad|>", 151656: "<|video_pad|>",
    151669: "<|audio_start|>", 151670: "<|audio_end|>", 151675: "<|audio_pad|>",
}  # fmt: skip
"""Of the published tokenizers."""
POSITIONS = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
VISION = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304}
SEEN = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-vl-4b": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        **SEEN,
        "text_config": {
            "model_type": "qwen3_vl_text", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "max_position_embeddings": 262144, "rope_theta": 5000000, "rope_scaling": POSITIONS, "tie_word_embeddings": True,
        },
        "vision_config": {
            **VISION, "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2560,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
    "qwen3-omni-30b": {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "enable_audio_output": True,
        "thinker_config": {
            "model_type": "qwen3_omni_moe_thinker",
            **SEEN,
            "audio_token_id": 151675, "audio_start_token_id": 151669, "audio_end_token_id": 151670, "user_token_id": 872,
            "position_id_per_seconds": 13, "seconds_per_chunk": 2,
            "text_config": {
                "model_type": "qwen3_omni_moe_text", "hidden_size": 2048, "intermediate_size": 768, "num_hidden_layers": 48,
                "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 152064,
                "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
                "max_position_embeddings": 65536, "rope_theta": 1000000, "rope_scaling": POSITIONS,
                "tie_word_embeddings": False,
            },
            "vision_config": {
                **VISION, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
                "out_hidden_size": 2048, "deepstack_visual_indexes": [8, 16, 24],
            },
            "audio_config": {
                "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
                "num_mel_bins": 128, "output_dim": 2048, "n_window": 50, "n_window_infer": 800,
                "downsample_hidden_size": 480, "max_source_positions": 1500,
            },
        },
    },
}  # fmt: skip
"""What of the hub's config.json says how large the models are."""


def recipe(name: str, *overrides: str) -> RunConfig:
    return load_config([ROOT / "recipes" / f"{name}.yaml"], overrides)


def model_folder(name: str, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder


@pytest.mark.parametrize("name", LARGE)
def test_a_large_recipe_has_no_problem_and_no_warning(name: str) -> None:
    config = recipe(name)
    assert [*warnings_of(config), *check_run(config)] == []
    assert config.training.backend.device == "cuda"  # type: ignore[attr-defined]
    assert config.data.media is not None
    assert "NOT RUN HERE" in (ROOT / "recipes" / f"{name}.yaml").read_text()
    assert "not been run here" in " ".join((ROOT / "recipes" / f"{name}.md").read_text().split())


@pytest.mark.parametrize("name", LARGE)
def test_the_bus_of_a_large_recipe_has_room_for_features_and_not_for_sixteen_times_as_many(name: str) -> None:
    with pytest.raises(ConfigError, match=r"bus.max_bytes: .* is too small for stages.0 \(rl\)"):
        check_run(recipe(name, "data.media.max_feature_bytes=512MiB"))


@pytest.mark.parametrize(
    ("name", "kind", "architecture", "language", "whole"),
    [
        ("qwen3-vl-4b", "qwen3_vl", "Qwen3VLForConditionalGeneration", 4_022_468_096, 4_437_815_808),
        (
            "qwen3-omni-30b",
            "qwen3_omni_moe_thinker",
            "Qwen3OmniMoeThinkerForConditionalGeneration",
            30_532_646_912,
            31_719_205_488,
        ),
    ],
    ids=LARGE[::-1],
)
def test_the_published_sizes_make_the_model_and_every_part_that_the_recipe_names(
    name: str, kind: str, architecture: str, language: int, whole: int, tmp_path: Path
) -> None:
    import torch

    from relax.model.load import load_model, load_model_config
    from relax.training.part import parameter_parts

    folder = model_folder(name, tmp_path)
    with torch.device("meta"):
        model = load_model(folder, "random", "float32")
    assert (type(model).__name__, load_model_config(folder).model_type) == (architecture, kind)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    sizes: dict[str, int] = {}
    for parameter, part in parameter_parts(model, family(name, folder)).items():
        sizes[part] = sizes.get(part, 0) + parameter.numel()
    assert (sizes["language"], sum(sizes.values())) == (language, whole)
    assert set(recipe(name).training.backend.parts) == set(sizes) - {"language"}  # type: ignore[attr-defined]


def family(name: str, folder: Path) -> Any:
    from relax.model.family import find_family
    from relax.model.load import load_model_config

    tokenizer = SimpleNamespace(convert_ids_to_tokens=TOKENS.__getitem__, chat_template="")
    return find_family(load_model_config(folder), folder, tokenizer)


@pytest.mark.parametrize(("name", "expected"), [("qwen3-vl-4b", "Qwen3VL"), ("qwen3-omni-30b", "Qwen3Omni")])
def test_the_family_is_found_and_prompts_of_the_recipe_fit(name: str, expected: str, tmp_path: Path) -> None:
    """A picture, a minute of sound and a video, as large as the recipe lets them be, leave room for the question."""
    from relax.core.message import MediaPart

    found, config = family(name, model_folder(name, tmp_path)), recipe(name)
    section = config.data.media
    assert type(found).__name__ == expected
    assert section is not None
    most = {"max_pixels": section.image.resize_max_pixels}
    image = MediaPart("image", "file:///a", options=most, facts={"width": 4000, "height": 3000})
    tokens = found.slot(image).count("<|image_pad|>")
    assert 0.9 <= tokens * 32 * 32 / (section.image.resize_max_pixels or 0) <= 1
    assert section.max_per_prompt * tokens < config.data.max_prompt_tokens or "audio" in found.modalities
    if "audio" not in found.modalities:
        return
    seconds = section.audio.max_s
    facts = {"samples": round(48000 * seconds), "rate": 48000, "seconds": seconds}
    heard = found.slot(MediaPart("audio", "file:///b", facts=facts)).count("<|audio_pad|>")
    assert heard == 13 * seconds
    assert tokens + heard < config.data.max_prompt_tokens // 2
    film = {"width": 1920, "height": 1080, "frames": 15000, "fps": 25.0, "seconds": 600.0, "audio": facts}
    given = section.video
    options = {"fps": given.fps, "max_frames": given.max_frames, "max_pixels": given.resize_max_pixels, "audio": True}
    slot = found.slot(MediaPart("video", "file:///c", options=options, facts=film))
    assert slot.count("<|audio_pad|>") == heard
    assert slot.count("<|video_pad|>") + heard < config.data.max_prompt_tokens * 2 // 3


def test_a_data_set_of_the_form_of_geometry3k_becomes_prompts(tmp_path: Path) -> None:
    """Its columns: `images`, a sequence of the image feature; `problem`, with the word <image>; `answer`."""
    import datasets
    from PIL import Image

    from relax.data.huggingface import HuggingFaceDataSet
    from relax.data.media.reference import raw_medium
    from relax.data.record import read_record

    features = datasets.Features(
        images=datasets.Sequence(datasets.Image()), problem=datasets.Value("string"), answer=datasets.Value("string")
    )
    rows = {"images": [[Image.new("RGB", (40, 30))]], "problem": ["<image>Find x."], "answer": [r"\sqrt { 2 }"]}
    datasets.DatasetDict(train=datasets.Dataset.from_dict(rows, features)).save_to_disk(tmp_path / "geometry")
    node: Any = source_node(recipe("qwen3-vl-4b", f"data.sources.0.path={tmp_path / 'geometry'}").data.sources[0])
    value = HuggingFaceDataSet(node, seed=0).read(0)
    record = read_record(value, node, 0)
    (part,) = record.messages[0].media
    assert (part.type, part.uri) == ("image", "record:geometry/0/0")
    assert (record.messages[0].text, record.reference, record.metadata) == ("Find x.", r"\sqrt { 2 }", {})
    assert raw_medium(value, node, 0).value.startswith(b"\x89PNG")


LISTING: list[dict[str, Any]] = [
    {
        "problem_id": 7, "problem": "What makes the sound?", "data_type": "image_audio", "problem_type": "multiple choice",
        "options": ["A. Dog", "B. Cat", "C. Car", "D. Bell"], "solution": "<answer>B</answer>",
        "path": {"image": "images/sample_7.jpg", "audio": "audios/sample_7.wav"}, "data_source": "OmniInstruct_v1-AVQA",
    },
    {
        "problem_id": 2, "problem": "What appears first?", "data_type": "video", "problem_type": "multiple choice",
        "options": ["A. A ball", "B. A box"], "solution": "<answer>A</answer>", "path": "./CLEVRER/video_2.mp4",
    },
    {
        "problem_id": 3, "problem": "How long is it?", "data_type": "image", "problem_type": "numerical", "options": [],
        "solution": "<answer>3</answer>", "path": "./Math/3.png",
    },
]  # fmt: skip
"""An item of AVQA-R1-6K and two of Video-R1, as their listings have them."""


def test_the_conversion_on_the_page_of_qwen3_omni_makes_records_of_its_sources(tmp_path: Path) -> None:
    from relax.data.record import read_record

    page = (ROOT / "recipes" / "qwen3-omni-30b.md").read_text()
    found = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    code: dict[str, Any] = {"__name__": "page"}
    exec(compile(found[1], "qwen3-omni-30b.md", "exec"), code)
    (tmp_path / "listing.json").write_text(json.dumps(LISTING))
    code["convert"](tmp_path / "listing.json")
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    avqa, videos = (source_node(source) for source in recipe("qwen3-omni-30b").data.sources)
    assert len(lines) == 2, "what is no multiple choice about sound and picture, or video, is left out"
    first = read_record(lines[0], avqa, 0)  # type: ignore[arg-type]
    assert [part.type for part in first.messages[0].media] == ["image", "audio"]
    assert first.messages[0].text == "What makes the sound?\nA. Dog\nB. Cat\nC. Car\nD. Bell"
    assert (first.reference, first.metadata["options"]) == ("B", ["Dog", "Cat", "Car", "Bell"])
    second = read_record(lines[1], videos, 1)  # type: ignore[arg-type]
    assert [(part.type, part.uri) for part in second.messages[0].media] == [("video", "file:./CLEVRER/video_2.mp4")]
    assert second.reference == "A"


def test_media_keys_without_data_media_are_refused_and_so_is_one_key_for_two() -> None:
    recipe = Path("recipes/omni-image-audio.yaml")
    with pytest.raises(ConfigError, match=r"media_keys.*data.media is not set"):
        load_config([recipe], ["data.media=null"])
    with pytest.raises(ConfigError, match=r"media_keys.*holds audio too"):
        load_config([recipe], ["data.sources.mixed.media_keys.image=audios"])
