"""The tables of cases and rules: each has a test that carries its id, or a reason why nothing of it exists to be tested.

A case is a fault that users of another project met (`test_case_a1_...`), a rule something that always holds here
(`test_rule_st1_...`). A name may carry several ids. What a test of that name asserts, nobody but its reader can judge.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

CASES = {
    "a": "1 2 3 4 6 7 8 9 11 12 13 14 15 17 18 19 21",  # asynchrony, staleness, accounting
    "b": "1 2 4 5 7 8 9 11 13 14 15",  # checkpoint and resume
    "c": "1 2 4 6 7 8 10 11",  # weight versions
    "d": "1 2 4 6 7 8 10 12 14 15 16 17 18",  # logprobs, loss, advantages
    "e": "1 3 4 5 7 8 10 11 12 14 15",  # tokens
    "f": "1 3 4 5 7 8 9 10 11 12 13 15",  # media
    "g": "1 3 5 6 7 8 9",  # data
    "h": "1 2 3 5 6 7 9 10",  # rewards
    "i": "1 3 4 5 7",  # agents and gateways
    "j": "1 2 5 6 7",  # packing and batching
    "k": "1 3 4 5 7",  # configuration
    "l": "2 3 4 6 7",  # metrics
    "m": "2 3 5 6 7",  # the bus
}
RULES = {
    "st": "1 2 3 4 5 6 7 8 9", "ac": "1 2 3 4 5", "tq": "1 2 3 4 5 6 7 8 9 10", "ws": "1 2 3 4 5 6 7", "rr": "1 2 3 4 5 6 7 8 9",
    "de": "1 2 3", "dt": "1 2 3 4", "tk": "1 2 3 4 5 6", "mm": "1 2 3 4 5 6", "lo": "1 2 3 4 5 6 7", "se": "1 2 3 4",
}  # fmt: skip

CASES_WITHOUT_CODE: Mapping[str, str] = {
    "d15": "no sequence or context parallelism: a sequence is computed whole by one process",
    "i1": "no tool is called for a model yet",
    "i4": "no turn is streamed",
    "i5": "no chat calls arrive from outside",
    "j7": "no experts are routed, so no routing is recorded",
}  # fmt: skip
RULES_WITHOUT_CODE: Mapping[str, str] = {}
"""Each may only leave these tables: with its first test, which `test_no_reason_is_stale` then asks for."""

_NAME = re.compile(r"test_(case|rule)((?:_(?:and_)?[a-z]{1,2}[0-9]+)+)(?:_|$)")


def ids_of(table: Mapping[str, str]) -> set[str]:
    return {f"{section}{number}" for section, numbers in table.items() for number in numbers.split()}


def named_tests() -> dict[str, dict[str, list[str]]]:
    """`case` and `rule` -> id -> the tests that carry it."""
    found: dict[str, dict[str, list[str]]] = {"case": defaultdict(list), "rule": defaultdict(list)}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (match := _NAME.match(node.name)):
                for id in re.findall(r"[a-z]{1,2}[0-9]+", match[2]):
                    found["case" if len(id.rstrip("0123456789")) == 1 else "rule"][id].append(node.name)
    return found


@pytest.mark.parametrize(
    ("kind", "table", "without"), [("case", CASES, CASES_WITHOUT_CODE), ("rule", RULES, RULES_WITHOUT_CODE)]
)
def test_every_id_has_a_test_or_a_reason(kind: str, table: Mapping[str, str], without: Mapping[str, str]) -> None:
    tests, ids = named_tests()[kind], ids_of(table)
    assert ids - tests.keys() - without.keys() == set(), "no test carries these ids"
    assert tests.keys() - ids == set(), "no such case or rule is in the table"
    assert without.keys() <= ids


@pytest.mark.parametrize(("kind", "without"), [("case", CASES_WITHOUT_CODE), ("rule", RULES_WITHOUT_CODE)])
def test_no_reason_is_stale(kind: str, without: Mapping[str, str]) -> None:
    assert without.keys() & named_tests()[kind].keys() == set(), "these have tests now; take them out of the table"


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("test_case_a1_something", ["a1"]),
        ("test_case_a8_i7_two_at_once", ["a8", "i7"]),
        ("test_rule_st1_and_ac1_hold", ["st1", "ac1"]),
        ("test_rule_that_reads", None),
        ("test_case_a1b_odd", None),
    ],
)
def test_names_are_read_as_they_are_meant(name: str, ids: list[str] | None) -> None:
    match = _NAME.match(name)
    assert (re.findall(r"[a-z]{1,2}[0-9]+", match[2]) if match else None) == ids
