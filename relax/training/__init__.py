"""Gradients behind one protocol: backends, optimizers, schedules, packing, checkpoints. Knows no algorithm."""
