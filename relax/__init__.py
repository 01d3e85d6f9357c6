"""Relax: an asynchronous reinforcement-learning engine for post-training language models of every modality."""

__version__ = "0.1.0"
