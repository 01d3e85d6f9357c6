"""Generators of media: right answers, disjoint splits, held-out sets that are fixed, media that can be read, refusals."""

import hashlib
import io
import sys
import wave
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from PIL import Image

from relax.core.error import DataError
from relax.data.chart import COLOURS as BAR_COLOURS
from relax.data.chart import bar_charts
from relax.data.clip import COLOURS, DIRECTIONS, moving_shapes
from relax.data.config import GeneratorConfig
from relax.data.digit import CLIPS, HIGH_HZ, LOW_HZ, RATE, pointed_digits
from relax.data.generator import GeneratorDataSet
from relax.data.scene import Draw, scenes

GENERATORS = [pointed_digits, moving_shapes, bar_charts]
Record = dict[str, Any]


def picture(record: Record) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(record["images"][0])))


def pitch(record: Record) -> float:
    """Hz of the loudest frequency of a record's sound."""
    with wave.open(io.BytesIO(record["audios"][0])) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    return float(np.abs(np.fft.rfft(samples)).argmax() * RATE / len(samples))


def pictures_of_digits(split: Any) -> dict[bytes, int]:
    """Every digit that records of one kind show on their left -> what it is."""
    records = pointed_digits(5, kinds={"left": 1}, split=split, count=3000)
    return {picture(record)[:, :32].tobytes(): int(record["reference"]) for record in records}


def mark(record: Record) -> str:
    """What tells one record's media from another's."""
    media = [*record.get("images", []), *(clip["array"].tobytes() for clip in record.get("videos", []))]
    return hashlib.sha256(b"|".join(media)).hexdigest()


def test_digits_and_sounds_of_the_splits_are_disjoint_and_labelled_the_same_everywhere() -> None:
    train, heldout = pictures_of_digits("train"), pictures_of_digits("heldout")
    assert len(train) > 1000
    assert 300 < len(heldout) < 400
    assert not train.keys() & heldout.keys()
    sounds = {
        split: {r["audios"][0] for r in pointed_digits(1, split=split, count=1000)} for split in ("train", "heldout")
    }  # type: ignore[arg-type]
    assert len(sounds["train"]) == len(sounds["heldout"]) == 2 * CLIPS
    assert not sounds["train"] & sounds["heldout"]


@pytest.mark.parametrize("digits", [2, 3])
def test_every_kind_of_question_is_answered_by_what_is_shown_and_heard(digits: int) -> None:
    kinds = {"left": 1, "right": 1, "tone": 1, "point": 2}
    records = list(pointed_digits(7, digits=digits, kinds=kinds, count=800))
    known = {**pictures_of_digits("train")}
    checked: Counter[str] = Counter()
    for record in records:
        place = round((digits - 1) * np.log(pitch(record) / LOW_HZ) / np.log(HIGH_HZ / LOW_HZ))
        shown = picture(record)
        assert shown.shape == (32, 32 * digits)
        digit_at = [known.get(shown[:, 32 * index : 32 * index + 32].tobytes()) for index in range(digits)]
        assert len(set(digit_at) - {None}) == digits - digit_at.count(None)
        right = {"left": digit_at[0], "right": digit_at[-1], "tone": place, "point": digit_at[place]}[record["kind"]]
        assert (
            record["prompt"]
            == "<image><audio>" + {"left": "l?", "right": "r?", "tone": "s?", "point": "p?"}[record["kind"]]
        )
        if right is not None:
            assert record["reference"] == str(right)
            checked[record["kind"]] += 1
    assert min(checked[kind] for kind in kinds) > 80
    assert checked["point"] > 1.4 * checked["tone"]


def test_a_blank_medium_says_nothing_and_changes_nothing_else() -> None:
    whole = list(pointed_digits(0, split="heldout", count=40))
    for blank, key, other in (("image", "images", "audios"), ("audio", "audios", "images")):
        blanked = list(pointed_digits(0, split="heldout", count=40, blank=blank))  # type: ignore[arg-type]
        assert len({record[key][0] for record in blanked}) == 1
        for before, after in zip(whole, blanked, strict=True):
            assert before[other] == after[other]
            assert (before["prompt"], before["reference"]) == (after["prompt"], after["reference"])
    assert picture(next(pointed_digits(0, blank="image"))).max() == 0


def test_jitter_moves_digits_and_classes_limit_them() -> None:
    plain = picture(next(pointed_digits(3)))
    moved = picture(next(pointed_digits(3, jitter=4)))
    assert plain.shape == moved.shape
    assert (plain != moved).any()
    references = {record["reference"] for record in pointed_digits(0, classes=3, count=200)}
    assert references == {"0", "1", "2"}
    assert {record["reference"] for record in pointed_digits(0, classes=[5, 2], count=200)} == {"2", "5"}
    listed = [next(pointed_digits(0, classes=classes)) for classes in ([0, 2, 4, 5], [5, 4, 2, 0], [2, 0, 4, 5])]
    assert listed[0] == listed[1] == listed[2]
    assert next(pointed_digits(0, classes=list(range(4)))) == next(pointed_digits(0, classes=4))


def test_without_scikit_learn_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax.data import digit

    digit._data_set.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"needs the package scikit-learn: pip install 'relax\[omni\]'"):
        next(pointed_digits(0))
    digit._data_set.cache_clear()


def colour(frame: np.ndarray[Any, Any]) -> str | None:
    lit = frame[frame.max(axis=2) > 100]
    return {rgb: name for name, rgb in COLOURS.items()}[tuple(map(int, lit[0]))] if len(lit) else None  # type: ignore[index]


def told(record: Record) -> str:
    """The answer, read from the frames."""
    frames = record["videos"][0]["array"]
    colours = [colour(frame) for frame in frames]
    if record["kind"] == "count":
        return str(sum(now is not None and before is None for before, now in pairwise([None, *colours])))
    if record["kind"] == "order":
        return next(name for name in colours if name)
    return next(
        name
        for name, (down, right) in DIRECTIONS.items()
        for step in (2, 3, 4)
        if all((np.roll(a, (step * down, step * right), (0, 1)) == b).all() for a, b in pairwise(frames))
    )


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize(("size", "side", "lit"), [(32, None, 64), (16, 8, 64)])
def test_clips_show_what_is_asked(split: Any, size: int, side: int | None, lit: int) -> None:
    records = list(moving_shapes(2, split=split, count=200, size=size, side=side))
    for record in records:
        clip = record["videos"][0]
        assert clip["array"].dtype == np.uint8
        assert clip["array"].shape == (8, size, size, 3)
        assert {int((frame.max(axis=2) > 100).sum()) for frame in clip["array"]} <= {0, lit}
        assert clip["fps"] == 4.0
        assert record["prompt"] == "<video>" + record["kind"][0] + "?"
        assert told(record) == record["reference"]
    assert set(Counter(record["kind"] for record in records)) == {"direction", "count", "order"}


def test_no_first_frame_tells_where_a_square_goes() -> None:
    """The places of the first frame are spread alike whatever the answer."""
    firsts: dict[str, list[np.ndarray[Any, Any]]] = {}
    for record in moving_shapes(4, kinds={"direction": 1}, count=2000):
        firsts.setdefault(record["reference"], []).append(record["videos"][0]["array"][0].max(axis=2) > 100)
    assert set(firsts) == set("lrud")
    for frames in firsts.values():
        share = np.mean(frames, axis=0)  # of the clips in which a pixel is lit: 64 of 1024 wherever it lies
        assert np.abs(share - 64 / 1024).max() < 0.05
        assert np.abs(share.mean(axis=0) - 64 / 1024).max() < 0.025
        assert np.abs(share.mean(axis=1) - 64 / 1024).max() < 0.025


def test_bars_show_what_is_asked() -> None:
    names = {rgb: name for name, rgb in BAR_COLOURS.items()}
    for record in bar_charts(1, bars=4, count=200):
        shown = picture(record)
        heights = Counter(
            names[pixel] for row in shown[:-1].tolist() for pixel in {tuple(p) for p in row} if pixel in names
        )
        extreme = max if record["kind"] == "highest" else min
        asked = extreme(heights, key=lambda name: heights[name])
        assert sorted(record["options"]) == sorted(heights)
        assert record["options"]["ABCD".index(record["reference"])] == asked
        listed = " ".join(f"{letter} {name}" for letter, name in zip("ABCD", record["options"], strict=True))
        assert record["prompt"] == f"<image>{record['kind']}? {listed}"
    assert (picture(next(bar_charts(0, blank="image")))[:-1] == 255).all()


@pytest.mark.parametrize("generator", [moving_shapes, bar_charts])
def test_scenes_are_different_and_splits_disjoint_whatever_the_seed(generator: Any) -> None:
    heldout = [mark(record) for record in generator(0, split="heldout", count=300)]
    train = [mark(record) for seed in (0, 1) for record in generator(seed, count=1000)]
    assert len(set(heldout)) == 300
    assert not set(heldout) & set(train)
    assert len(set(train[:1000])) == 1000


@pytest.mark.parametrize("generator", GENERATORS)
def test_heldout_is_the_same_for_every_seed_and_train_is_not(generator: Any) -> None:
    def marks(seed: int, split: str) -> list[tuple[str, str, str]]:
        return [(r["prompt"], r["reference"], mark(r)) for r in generator(seed, split=split, count=40)]

    assert marks(0, "heldout") == marks(1, "heldout")
    assert marks(0, "train") == marks(0, "train") != marks(1, "train")
    longer = [(r["prompt"], r["reference"], mark(r)) for r in generator(0, count=60)]
    assert longer[:40] == marks(0, "train")


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize(
    "args",
    [{"split": "test"}, {"count": 0}, {"blank": "text"}, {"kinds": {"other": 1}}, {"kinds": {}}, {"kinds": {"point": 1.5, "lowest": 1.5}}],
)  # fmt: skip
def test_impossible_arguments_are_refused(generator: Any, args: Any) -> None:
    with pytest.raises(DataError, match=f"{generator.__name__}: "):
        next(generator(0, **args))


@pytest.mark.parametrize(
    ("generator", "args"),
    [
        (pointed_digits, {"digits": 1}),
        (pointed_digits, {"digits": 3, "classes": 2}),
        (pointed_digits, {"classes": 11}),
        (pointed_digits, {"classes": [3]}),
        (pointed_digits, {"classes": [3, 3, 4]}),
        (pointed_digits, {"classes": [3, 4, 10]}),
        (pointed_digits, {"classes": "0245"}),
        (pointed_digits, {"scale": 0}),
        (pointed_digits, {"jitter": 17}),
        (pointed_digits, {"seconds": 0}),
        (moving_shapes, {"size": 8}),
        (moving_shapes, {"side": 0}),
        (moving_shapes, {"side": 17}),
        (moving_shapes, {"frames": 7}),
        (moving_shapes, {"fps": 0}),
        (bar_charts, {"bars": 1}),
        (bar_charts, {"bars": 6, "size": 32}),
    ],
)
def test_sizes_out_of_range_are_refused_with_the_range(generator: Any, args: Any) -> None:
    with pytest.raises(
        DataError, match=rf"{generator.__name__}: {list(args)[-1] if 'bars' not in args else ''}.* expected"
    ):
        next(generator(0, **args))


def test_more_scenes_than_there_are_is_an_error() -> None:
    with pytest.raises(DataError, match="toy: count is 9, but only 4 different train scenes were found; lower count"):
        list(scenes("toy", 0, "train", 9, lambda draw: ((v := draw.below(4)), f"x{v}")))


def test_a_draw_is_a_pure_function_of_its_parts() -> None:
    """Values that every machine and every version of numpy gives."""
    draw = Draw("a", 1)
    assert [draw.below(100) for _ in range(5)] == [Draw("a", 1).below(100), *[draw_after(n) for n in range(1, 5)]]
    assert sorted(Draw("b").distinct(range(5), 5)) == [0, 1, 2, 3, 4]
    noise = Draw("c").noise(10_000)
    assert -1 <= noise.min() < -0.99
    assert 0.99 < noise.max() < 1


def draw_after(number: int) -> int:
    draw = Draw("a", 1)
    return [draw.below(100) for _ in range(number + 1)][-1]


def test_a_generator_source_names_them() -> None:
    config = GeneratorConfig(
        name="digits", task="t", function="relax.data.digit:pointed_digits", args={"count": 5},
        media_keys={"image": "images", "audio": "audios"}
    )  # fmt: skip
    assert len(GeneratorDataSet(config)) == 5


def test_ordered_charts_have_one_order_of_colours_and_options() -> None:
    records = list(bar_charts(0, bars=3, size=48, ordered=True, count=60))
    assert {tuple(record["options"]) for record in records} == {("red", "green", "blue")}
    assert {record["prompt"].partition("?")[2] for record in records} == {" A red B green C blue"}
    assert {record["reference"] for record in records} == {"A", "B", "C"}
    assert len({record["images"][0] for record in records}) == 60
    assert len({tuple(record["options"]) for record in bar_charts(0, bars=3, count=60)}) > 10
