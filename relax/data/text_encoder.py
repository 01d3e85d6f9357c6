"""The ids of a text as `tokenizer(text, add_special_tokens=False)` gives them, without what that call does besides.

Called by the renderer for every prompt and every completion. A tokenizer of the `tokenizers` library whose class leaves the call as
it is is asked directly, which takes a fifth of the time for a short text; any other is called.
"""

from typing import Any

_CALLED = ("__call__", "_encode_plus", "_convert_encoding", "set_truncation_and_padding", "_switch_to_input_mode")
"""What a call consists of."""


class TextEncoder:
    """Of one tokenizer, for one thread: encoding changes the tokenizer's own settings."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._core = _core_of(tokenizer)

    def ids(self, text: str, split_special: bool = False) -> list[int]:
        """With `split_special` a special token that the text spells is taken as text, as far as the tokenizer can; else that is as the
        tokenizer is set up."""
        core = self._core
        if core is None:
            options = {"split_special_tokens": True} if split_special else {}
            called: list[int] = self._tokenizer(text, add_special_tokens=False, **options)["input_ids"]
            return called
        splits = split_special or self._tokenizer.split_special_tokens
        if core.encode_special_tokens != splits:
            core.encode_special_tokens = splits
        # Whoever else encodes with this tokenizer may have left these on.
        if core.truncation is not None:
            core.no_truncation()
        if core.padding is not None:
            core.no_padding()
        found: list[int] = core.encode(text, add_special_tokens=False).ids
        return found


def _core_of(tokenizer: Any) -> Any:
    """What encodes for a tokenizer, when its class adds nothing of its own to that; else None."""
    base = next((kind for kind in type(tokenizer).__mro__ if kind.__name__ == "TokenizersBackend"), None)
    if base is None or not base.__module__.startswith("transformers."):
        return None
    is_plain = all(getattr(type(tokenizer), name, None) is getattr(base, name, None) for name in _CALLED)
    return tokenizer.backend_tokenizer if is_plain else None
