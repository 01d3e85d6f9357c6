"""Inference behind one protocol: `torch` (embedded), `emulated`, and the router that spreads requests over them."""
