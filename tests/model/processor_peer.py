"""A process of its own that renders conversations with each family's Hugging Face processor.

Run as `python -m tests.model.processor_peer IN OUT`: IN and OUT are folders with one `.npz` and one `.json` for each case.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.model import torchvision_guard


def main(source: Path, target: Path) -> None:
    torchvision_guard.install()
    import torch

    torch.set_num_threads(1)
    processors: dict[str, Any] = {}
    for file in sorted(source.glob("*.json")):
        case = json.loads(file.read_text())
        with np.load(file.with_suffix(".npz")) as arrays:
            folder = case["folder"]
            if folder not in processors:
                processors[folder] = load_processor(folder)
            found = render(processors[folder], case, dict(arrays))
        np.savez(target / f"{file.stem}.npz", **found)


def load_processor(folder: str) -> Any:
    """With the PIL image processor, which resizes as our decode worker does."""
    from transformers import AutoProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = AutoProcessor.from_pretrained(folder)
    written = json.loads((Path(folder) / "processor_config.json").read_text())["image_processor"]
    written.pop("image_processor_type")
    processor.image_processor = Qwen2VLImageProcessorPil(**written)
    return processor


def render(processor: Any, case: dict[str, Any], arrays: dict[str, Any]) -> dict[str, Any]:
    """Ids and features of a conversation, as numpy arrays."""
    text = processor.apply_chat_template(case["messages"], tokenize=False, add_generation_prompt=True)
    media: dict[str, list[Any]] = {"images": [], "audio": [], "videos": []}
    metadata = []
    for name, kind in case["media"]:
        # A small array does not say which of its sides is the colours; a picture does.
        media[kind].append(Image.fromarray(arrays[name]) if kind == "images" else arrays[name])
        if name in case["metadata"]:
            metadata.append(case["metadata"][name])
    options: dict[str, Any] = {"images_kwargs": {}, "videos_kwargs": dict(case["video_options"])}
    if metadata:
        options["videos_kwargs"]["video_metadata"] = metadata
    if case["sounds"] is not None:
        options |= {"audio_from_video_indices": case["sounds"], "load_audio_from_video": True}
    given = {kind: found for kind, found in media.items() if found}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = processor(text=[text], return_tensors="pt", **given, **options)
    return {name: value.numpy() if hasattr(value, "numpy") else np.array(value) for name, value in output.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
