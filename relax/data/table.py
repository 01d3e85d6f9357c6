"""The table of data sources: how the records of a `data.sources` node are read."""

from relax.config.table import ComponentTable, Entry

SOURCES = ComponentTable(
    "source",
    {
        "jsonl": Entry(
            "relax.data.config:JsonlConfig", "relax.data.jsonl:JsonlDataSet", "JSON Lines or JSON files on disk"
        ),
        "generator": Entry(
            "relax.data.config:GeneratorConfig",
            "relax.data.generator:GeneratorDataSet",
            "records made by a Python function",
        ),
    },
    imported="relax.data.config:ImportedSourceConfig",
)
