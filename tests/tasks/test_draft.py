"""What an engine is asked to continue: read-only, and not copied where it is read-only already."""

import numpy as np
import pytest

from relax.core.completion import frozen
from relax.tasks.draft import Draft


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_the_context_is_read_only_and_its_owner_keeps_what_is_his(dtype: type, is_frozen: bool) -> None:
    shown = np.array([1, 2, 3], dtype)
    draft = Draft()
    draft.begin(frozen(shown) if is_frozen else shown)
    context = draft.token_ids
    assert context.tolist() == [1, 2, 3]
    assert context.dtype == np.int32
    assert not context.flags.writeable
    assert shown.flags.writeable is not is_frozen
    assert (context is shown) is (is_frozen and dtype is np.int32)
    draft.show(frozen(np.array([4], np.int32)))
    assert draft.token_ids.tolist() == [1, 2, 3, 4]
