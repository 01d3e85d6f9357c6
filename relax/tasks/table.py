"""The environments and rewards that a task may name."""

from typing import Any

from relax.config.base import ComponentConfig
from relax.config.table import ComponentTable, Entry, load_object

ENVIRONMENTS = ComponentTable(
    "environment",
    {
        "single_turn": Entry(
            "relax.tasks.config:SingleTurnConfig",
            "relax.tasks.environments.single_turn:SingleTurn",
            "one question, one answer",
        ),
    },
)
"""Components are called as `component(config)`, once for every trajectory."""


class RewardTable(ComponentTable):
    """A table in which an import path may also name a plain function."""

    __slots__ = ()

    def component(self, name: str) -> Any:
        """What builds the reward; for a path to anything without a `Config` of its own, the builder of function rewards."""
        if name in self.entries:
            return load_object(self.entries[name].component)
        own = getattr(load_object(name), "Config", None)
        if isinstance(own, type) and issubclass(own, ComponentConfig):
            return load_object(name)
        return load_object("relax.tasks.rewards.function:build_function")


REWARDS = RewardTable(
    "reward",
    {
        "exact": Entry(
            "relax.tasks.config:ExactConfig",
            "relax.tasks.rewards.exact:build_exact",
            "the response equals the reference",
        ),
        "numeric": Entry(
            "relax.tasks.config:NumericConfig",
            "relax.tasks.rewards.numeric:build_numeric",
            "the number in the response is right",
        ),
        "math_verify": Entry(
            "relax.tasks.config:MathVerifyConfig",
            "relax.tasks.rewards.math_verify:build_math_verify",
            "the expression equals the reference by math-verify",
        ),
        "multiple_choice": Entry(
            "relax.tasks.config:MultipleChoiceConfig",
            "relax.tasks.rewards.multiple_choice:build_multiple_choice",
            "the last stated option is the right one",
        ),
        "count": Entry(
            "relax.tasks.config:CountConfig",
            "relax.tasks.rewards.count:build_count",
            "the number stated, in digits or words, is right",
        ),
        "open_answer": Entry(
            "relax.tasks.config:OpenAnswerConfig",
            "relax.tasks.rewards.open_answer:build_open_answer",
            "the short answer stated is right, however it is written",
        ),
        "iou": Entry(
            "relax.tasks.config:IoUConfig",
            "relax.tasks.rewards.iou:build_iou",
            "how far the boxes stated cover the right ones",
        ),
        "word_error_rate": Entry(
            "relax.tasks.config:WordErrorRateConfig",
            "relax.tasks.rewards.word_error_rate:build_word_error_rate",
            "1 minus the word error rate of a transcript",
        ),
        "regex": Entry(
            "relax.tasks.config:RegexConfig",
            "relax.tasks.rewards.regex:build_regex",
            "the response matches a pattern, or a group of it equals the reference",
        ),
        "length": Entry(
            "relax.tasks.config:LengthConfig",
            "relax.tasks.rewards.length:build_length",
            "a penalty that grows as the sampled tokens come near a budget",
        ),
        "reasoning_gym": Entry(
            "relax.tasks.config:ReasoningGymConfig",
            "relax.tasks.rewards.reasoning_gym:build_reasoning_gym",
            "the verifier of the record's own reasoning-gym task",
        ),
        "judge": Entry(
            "relax.tasks.config_judge:JudgeConfig",
            "relax.tasks.rewards.judge:build_judge",
            "what a model of its own says about the answer",
        ),
        "pairwise_judge": Entry(
            "relax.tasks.config_judge:PairwiseJudgeConfig",
            "relax.tasks.rewards.pairwise_judge:build_pairwise_judge",
            "the share of its siblings that an answer beats, as a model sees it",
        ),
    },
    imported="relax.tasks.config:FunctionConfig",
)
"""Components are called as `component(config, pool=pool)`, once for every task; those whose node names a `judge` get
`judge=` (a `relax.tasks.judge_engine.JudgeEngine`) as well."""
