"""The words of relax: what crosses a boundary between rooms. Loads without torch."""
