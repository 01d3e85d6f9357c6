"""One file for each family of models that read media; `relax.model.family` finds them."""
