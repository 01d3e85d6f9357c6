"""Loads a model, knows its tokenizer, vocabulary and parameter names, and turns logits into logprobs."""
