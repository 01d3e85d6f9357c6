"""Files of the run directory are whole or as they were before."""

from pathlib import Path

import pytest

from relax.services.file import write_whole, written_aside


@pytest.mark.parametrize("content", ["ä\n", "ä\n".encode()])
def test_text_and_bytes_replace_what_was_there(tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "file.txt"
    path.write_text("before")
    write_whole(path, content)
    assert path.read_bytes() == "ä\n".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_half_way_leaves_what_was_there_and_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("before")
    with pytest.raises(OSError, match="disk full"), written_aside(path) as aside:  # noqa: PT012
        assert aside.parent == path.parent
        aside.write_text("half")
        assert path.read_text() == "before"
        raise OSError("disk full")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_gone_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        write_whole(tmp_path / "gone" / "file.txt", "text")
