"""The embedded engine: `kv` holds keys and values, `forward` runs the model, `sampler` draws tokens, `batcher` schedules.

`engine` is the async shell around them and the only file that others import.
"""
