"""The tables of data sources (how the records of a `data.sources` node are read) and of curricula (`data.curriculum`)."""

from relax.config.table import ComponentTable, Entry

SOURCES = ComponentTable(
    "source",
    {
        "jsonl": Entry(
            "relax.data.config:JsonlConfig", "relax.data.jsonl:JsonlDataSet", "JSON Lines or JSON files on disk"
        ),
        "parquet": Entry(
            "relax.data.config:ParquetConfig", "relax.data.parquet:ParquetDataSet", "Parquet files on disk"
        ),
        "datasets": Entry(
            "relax.data.config:DatasetsConfig",
            "relax.data.huggingface:HuggingFaceDataSet",
            "a Hugging Face data set: saved on disk, loadable, or on the hub",
        ),
        "reasoning_gym": Entry(
            "relax.data.config:ReasoningGymConfig",
            "relax.data.reasoning_gym:ReasoningGymDataSet",
            "problems of one task of the reasoning-gym package",
        ),
        "generator": Entry(
            "relax.data.config:GeneratorConfig",
            "relax.data.generator:GeneratorDataSet",
            "records made by a Python function",
        ),
    },
    imported="relax.data.config:ImportedSourceConfig",
)

CURRICULA = ComponentTable(
    "curriculum",
    {
        "learnability": Entry(
            "relax.data.config:LearnabilityConfig",
            "relax.data.curriculum:Learnability",
            "more of the sources whose prompts succeed sometimes",
        ),
    },
)
