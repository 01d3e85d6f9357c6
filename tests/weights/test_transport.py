"""Which transport fits which placement."""

import pytest

from relax.config.table import load_object
from relax.core.error import UserError
from relax.weights.transport import TRANSPORTS, build_transport, choose_transport


@pytest.mark.parametrize(
    ("name", "same_process", "same_node", "expected"),
    [
        ("auto", True, True, "memory"),
        ("auto", False, True, "shared"),
        ("auto", False, False, "disk"),
        ("memory", True, True, "memory"),
        ("shared", True, True, "shared"),
        ("shared", False, True, "shared"),
        ("disk", False, True, "disk"),
        ("disk", False, False, "disk"),
        ("broadcast", False, True, "broadcast"),
    ],
)
def test_the_nearest_transport_that_reaches_is_chosen(
    name: str, same_process: bool, same_node: bool, expected: str
) -> None:
    assert choose_transport(name, same_process=same_process, same_node=same_node) == expected


@pytest.mark.parametrize(
    ("name", "same_node", "message"),
    [
        ("memory", True, "is memory, but an engine is in another process .* auto or shared, disk, broadcast"),
        ("memory", False, "on another node .* auto or disk, broadcast"),
        ("shared", False, "is shared, but an engine is on another node"),
        ("pigeon", True, "use auto or one of memory"),
    ],
)
def test_one_that_does_not_reach_is_refused(name: str, same_node: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_transport(name, same_process=False, same_node=same_node)


def test_every_name_of_the_configuration_has_its_classes() -> None:
    from typing import get_args, get_type_hints

    from relax.config.section import WeightsSection

    literal = get_type_hints(WeightsSection)["transport"]
    assert set(get_args(literal)) == {"auto", *TRANSPORTS}
    for transport in TRANSPORTS.values():
        assert hasattr(load_object(transport.reader), "fetch")
        assert transport.writer is None or hasattr(load_object(transport.writer), "publish")


def test_one_process_has_one_transport() -> None:
    with pytest.raises(UserError, match=r"share a process; use auto or memory, or runtime\.type=ray"):
        build_transport("shared")
