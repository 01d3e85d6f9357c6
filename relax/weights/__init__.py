"""Moves numbered weight versions from trainer to engines, verified and atomic; never decides when."""
