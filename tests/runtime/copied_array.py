"""What both codecs owe an array: the same values in the same layout, in memory of its own that nobody can write to."""

from typing import Any

import numpy as np
import pytest


def assert_copied(array: Any, result: Any) -> None:
    assert result.dtype == array.dtype
    assert result.shape == array.shape
    assert result.tobytes() == array.tobytes()
    if array.flags.f_contiguous or array.flags.c_contiguous:
        assert result.flags.f_contiguous == array.flags.f_contiguous
    assert not result.flags.writeable
    assert not np.shares_memory(result, array)
    with pytest.raises(ValueError, match="WRITEABLE"):
        result.flags.writeable = True
