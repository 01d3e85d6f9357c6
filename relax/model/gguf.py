"""GGUF files: turned once into a plain Hugging Face folder in float32, kept in a cache folder.

Called by `source`. The folder appears whole or not at all (written aside, renamed) and is keyed by place, size and time of the
file, so a file that changed is converted again. Reading needs the `gguf` package; the numbers are transformers' own.
"""

import io
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from hashlib import blake2b
from pathlib import Path
from typing import Any

from relax.core.error import UserError

CACHE_VARIABLE = "RELAX_CACHE"
"""Environment variable: the cache folder where `model.cache` says nothing."""
FORMAT = 1
"""Counts up when a conversion writes something else, so that folders made before are not used."""

_report = logging.getLogger(__name__)
_MAGIC = b"GGUF"
_ASIDE = ".writing-"


def is_gguf(file: Path) -> bool:
    """Whether the file begins as a GGUF file does."""
    with file.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC


def cache_folder(cache: str | None = None) -> Path:
    """`cache`, else what RELAX_CACHE names, else `relax` in the user's cache folder."""
    named = cache or os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "relax"


def convert_gguf(file: Path, cache: str | None = None) -> Path:
    """The Hugging Face folder (weights, configuration, tokenizer) of a GGUF file; made when it is not in the cache yet.

    Raises UserError when the `gguf` package is missing, the file is damaged or of an architecture that transformers cannot
    read, or the cache takes no files.
    """
    home = cache_folder(cache) / "gguf"
    folder = home / _key(file)
    if folder.is_dir():
        return folder
    _need_gguf(file)
    aside = home / f"{_ASIDE}{folder.name}-{os.getpid()}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        _clear_aside(home)
        aside.mkdir()
        _report.info("converting %s, once, into %s", file, folder)
        _convert(file, aside)
        _move(aside, folder)
    except OSError as error:
        raise UserError(
            f"cannot write the converted model {file.name} into {home}: {error}; free space there, or set model.cache or "
            f"{CACHE_VARIABLE} to another folder"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _key(file: Path) -> str:
    """A name that changes with the file: place, size, time of change, format."""
    found = file.resolve()
    facts = (str(found), found.stat().st_size, found.stat().st_mtime_ns, FORMAT)
    return f"{file.stem}-{blake2b(repr(facts).encode(), digest_size=8).hexdigest()}"


def _need_gguf(file: Path) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(f"{file} is a GGUF file, and reading it needs the package 'gguf'; pip install gguf") from error


def _clear_aside(home: Path) -> None:
    """Remove what killed conversions left; one that still runs keeps its folder."""
    for left in home.glob(f"{_ASIDE}*"):
        process = int(left.name.rpartition("-")[2])
        if process == os.getpid() or not Path(f"/proc/{process}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _move(aside: Path, folder: Path) -> None:
    try:
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was quicker: its folder is as good
            raise


def _convert(file: Path, aside: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as progress

    progress.disable_progress_bar()
    place: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        with redirect_stderr(io.StringIO()):  # a progress bar that cannot be turned off
            model = AutoModelForCausalLM.from_pretrained(str(file.parent), dtype="float32", **place)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **place)
    except Exception as error:  # gguf and transformers raise whatever the damaged part led to
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"GGUF file {str(file)!r} cannot be read ({type(error).__name__}: {reason}); download it again, or use a model of an "
            "architecture that transformers reads from GGUF"
        ) from error
    # The weights are plain by now; the entry that says otherwise would make every later reader quantise them again.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.config._name_or_path = model.generation_config._name_or_path = ""
    _restore_splitting(file, tokenizer)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)


def _restore_splitting(file: Path, tokenizer: Any) -> None:
    """Give the tokenizer the text splitting that the file names, where transformers does not know that name.

    Without it the ids of some texts (a run of spaces before a digit) are not those that the model was trained on.
    """
    from gguf import GGUFReader
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    fields = GGUFReader(str(file)).fields
    name = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else "default"
    kind = fields["tokenizer.ggml.model"].contents() if "tokenizer.ggml.model" in fields else ""
    build = _SPLITTINGS.get(name)
    if build is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = build()
    elif kind == "gpt2" and name not in _PLAIN and name not in GGUF_PRE_TOKENIZER_SPLITS:
        _report.warning(
            "%s splits text by the rules %r, which neither transformers nor relax knows: the tokens of some texts may differ from "
            "those that the model was trained on; set model.tokenizer to its original tokenizer",
            file,
            name,
        )


def _digits_alone() -> Any:
    """Every digit for itself, then GPT-2's rules: what SmolLM and the StarCoder family were trained with."""
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


_SPLITTINGS: dict[str, Callable[[], Any]] = dict.fromkeys(
    ("smollm", "starcoder", "refact", "command-r", "codeshell"), _digits_alone
)
"""Name in the file (`tokenizer.ggml.pre`) -> splitting that transformers' reader leaves out."""
_PLAIN = ("default", "gpt-2", "gpt2")
"""Names of the splitting that transformers' reader builds."""
