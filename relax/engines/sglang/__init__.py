"""Inference by an SGLang server: `client` speaks HTTP, `answer` reads it, `turn` is a request, `folder` keeps weight files.

`engine` joins them and is the only file that others import.
"""
