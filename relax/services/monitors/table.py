"""The monitors that `monitors[].type` may name.

A monitor is built as `component(config_node, directory=RunDirectory, outline=RunOutline)` and does nothing before its first
`log`; the hub then isolates it (RR9). One with an async method `notice(kind, text)` also gets the notices of the run; with
`takes_metrics = False` it gets nothing else.
"""

from relax.config.table import ComponentTable, Entry

MONITORS = ComponentTable(
    "monitor",
    {
        "console": Entry(
            "relax.services.monitors.config:ConsoleConfig",
            "relax.services.monitors.console:ConsoleMonitor",
            "progress on the terminal: a live table, or plain lines in a log",
        ),
        "jsonl": Entry(
            "relax.services.monitors.config:JsonlConfig",
            "relax.services.monitors.jsonl:JsonlMonitor",
            "metrics as lines of JSON in metrics.jsonl of the run directory, samples in samples.jsonl",
        ),
        "tensorboard": Entry(
            "relax.services.monitors.config:TensorboardConfig",
            "relax.services.monitors.tensorboard:TensorboardMonitor",
            "event files for TensorBoard in the run directory",
        ),
        "notify": Entry(
            "relax.services.monitors.config:NotifyConfig",
            "relax.services.monitors.notify:NotifyMonitor",
            "messages by mail, chat or phone about restarts, stalls, failures and the end (apprise)",
        ),
    },
    imported="relax.services.monitors.config:ImportedMonitorConfig",
)
