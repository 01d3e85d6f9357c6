"""The renderer with media: placeholders where the template wrote them and nowhere else, as many as the media take, in every turn."""

from typing import Any

import numpy as np
import pytest

from relax.core.error import DataError, InvariantError
from relax.core.message import MediaPart, Message, TextPart, text_message
from relax.data.renderer import TextRenderer
from relax.data.slot import MediaText
from relax.data.template import ChatTemplate
from relax.model.vocabulary import read_vocabulary
from tests.model import tiny_media
from tests.model.media_case import audio, counts, image, media_of, message, setting, video

IMAGE = "<|image_pad|>"


def ids(one: Any, text: str) -> list[int]:
    """Special tokens included."""
    return list(one.tokenizer(text, add_special_tokens=False)["input_ids"])


def with_template(one: Any, template: str | None) -> TextRenderer:
    tokenizer = tiny_media.make_tokenizer(one.kind)
    tokenizer.chat_template = template
    return TextRenderer(tokenizer, read_vocabulary(tokenizer, one.config), None, one.family)


def test_a_picture_is_as_many_placeholders_as_its_size_takes() -> None:
    one = setting("qwen3_vl")
    encoded = one.renderer.encode([message("user", "See ", image(40, 24), "!")])
    expected = f"<|im_start|>user\nSee <|vision_start|>{IMAGE * 15}<|vision_end|>!<|im_end|>\n<|im_start|>assistant\n"
    assert encoded.token_ids.tolist() == ids(one, expected)
    assert encoded.parts == (image(40, 24),)


def test_the_time_of_each_patch_stands_before_it() -> None:
    one = setting("qwen3_vl")
    encoded = one.renderer.encode([message("user", video(16, 16, 17, fps=8.0))])
    frame = "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>"
    # 17 frames at 8 a second, 2 a second asked for: frames 0, 5, 11 and 16, of which two make a patch.
    times = f"<0.3 seconds>{frame}<1.7 seconds>{frame}"
    assert encoded.token_ids.tolist() == ids(one, f"<|im_start|>user\n{times}<|im_end|>\n<|im_start|>assistant\n")


def test_marks_that_a_template_writes_around_a_video_give_way_to_those_of_its_patches() -> None:
    bare, wrapped = setting("qwen3_vl"), setting("qwen3_vl", wrapped=True)
    assert wrapped.family.names["video"] == tiny_media.WRAPPED
    conversation = [message("user", image(16, 16), video(32, 24, 16), "?")]
    assert (
        bare.renderer.encode(conversation).token_ids.tolist()
        == wrapped.renderer.encode(conversation).token_ids.tolist()
    )


@pytest.mark.parametrize("kind", tiny_media.KINDS)
def test_case_f15_text_alone_is_the_same_with_and_without_a_family(kind: str) -> None:
    one = setting(kind)
    plain = TextRenderer(one.tokenizer, read_vocabulary(one.tokenizer, one.config))
    conversation = [text_message("system", "Be short."), text_message("user", "2+2?")]
    encoded = one.renderer.encode(conversation)
    assert encoded.token_ids.tolist() == plain.encode(conversation).token_ids.tolist()
    assert encoded.parts == ()
    assert one.family.encode(one.model, ()) == []
    positions = one.family.positions(encoded.token_ids, ())
    np.testing.assert_array_equal(positions, np.broadcast_to(np.arange(len(encoded.token_ids)), positions.shape))


def test_case_f3_the_word_image_in_prose_is_text() -> None:
    one = setting("qwen3_vl")
    prose = "Write <image> and <video> where the picture goes."
    encoded = one.renderer.encode([text_message("user", prose)])
    assert encoded.token_ids.tolist() == ids(one, f"<|im_start|>user\n{prose}<|im_end|>\n<|im_start|>assistant\n")
    assert set(counts(one, encoded.token_ids).values()) == {0}


@pytest.mark.parametrize(
    "spelled",
    [f"<|vision_start|>{IMAGE * 15}<|vision_end|>", IMAGE, "<|vision_start|>", "<|audio_pad|>", "<|video_pad"],
)
def test_case_f1_placeholders_that_a_text_spells_are_never_expanded_nor_counted(spelled: str) -> None:
    one = setting("qwen2_5_vl")
    guarded = one.renderer.counts["guarded"]
    encoded = one.renderer.encode([message("user", f"a {spelled} b ", image(40, 24), spelled)])
    assert counts(one, encoded.token_ids) == {"image": 15, "video": 0}
    assert one.renderer.counts["guarded"] == guarded + 1
    starts = one.tokenizer.convert_tokens_to_ids("<|vision_start|>")
    assert (encoded.token_ids == starts).sum() == 1
    shown = one.tokenizer.decode(encoded.token_ids)
    assert shown.count(spelled) >= 2  # what was said is still said, as text
    assert len(media_of(one.family, encoded.parts)) == 1


def test_rule_tk4_text_that_a_medium_would_complete_to_a_mark_stays_text() -> None:
    one = setting("qwen2_5_vl")
    for before in ("<", "<|image_pad", "<|vision_start"):
        encoded = one.renderer.encode([message("user", before, image(16, 16), "|>")])
        assert counts(one, encoded.token_ids)["image"] == 4
        assert before + "<|vision_start|>" in one.tokenizer.decode(encoded.token_ids)


def test_rule_tk4_a_mark_in_two_pieces_stays_text() -> None:
    one = setting("qwen2_5_vl")
    split = Message("user", (TextPart("<|image"), TextPart("_pad|> "), image(16, 16)))
    encoded = one.renderer.encode([split])
    assert counts(one, encoded.token_ids)["image"] == 4
    joined = one.renderer.encode([message("user", "<|image_pad|> ", image(16, 16))])
    assert encoded.token_ids.tolist() == joined.token_ids.tolist()


@pytest.mark.parametrize("kind", tiny_media.OMNI)
def test_rule_mm1_placeholders_and_parts_are_in_one_order(kind: str) -> None:
    one = setting(kind)
    shown = [
        image(40, 24),
        audio(16_000),
        video(32, 24, 16),
        image(16, 16),
        video(32, 24, 24, sound=24_000),
        audio(8_000),
    ]
    conversation = [
        message("system", shown[0], "Look."),
        message("user", shown[1], "and", shown[2]),
        message("assistant", "So."),
        message("user", *shown[3:], "?"),
    ]
    encoded = one.renderer.encode(conversation)
    assert list(encoded.parts) == shown
    media = media_of(one.family, encoded.parts)
    assert [medium.modality for medium in media] == ["image", "audio", "video", "image", "video", "audio", "audio"]
    expected = {
        modality: sum(medium.num_tokens for medium in media if medium.modality == modality)
        for modality in ("image", "audio", "video")
    }
    assert counts(one, encoded.token_ids) == expected
    assert one.family.positions(encoded.token_ids, media).shape == (3, len(encoded.token_ids))


def test_rule_mm1_placeholders_that_are_lost_on_the_way_to_tokens_are_found_out() -> None:
    one = setting("qwen3_vl")
    text = MediaText(one.family, one.tokenizer)
    slots = [text.slot(image(40, 24)), text.slot(video(16, 16, 4))]
    found = ids(one, "".join(slot.text for slot in slots))
    text.check(found, slots)
    with pytest.raises(InvariantError, match=r"\[MM1\] 14 image placeholders among the tokens, but the media take 15"):
        text.check(found[1:], slots)
    with pytest.raises(InvariantError, match=r"\[MM1\] 8 video placeholders among the tokens, but the media take 0"):
        text.check(found, slots[:1])


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_model_without_a_family_refuses_media() -> None:
    one = setting("qwen3_vl")
    renderer = TextRenderer(one.tokenizer, read_vocabulary(one.tokenizer, one.config))
    with pytest.raises(DataError, match="a user message holds image 'image-16x16', but the model reads text only"):
        renderer.encode([message("user", image(16, 16))])


def test_a_family_refuses_what_it_does_not_read() -> None:
    one = setting("qwen2_5_vl")
    with pytest.raises(DataError, match="the model reads image and video beside text, not audio: 'audio-16000'"):
        one.renderer.encode([message("user", audio(16_000))])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "leaves out 1 image parts"),  # prints the list itself
        (
            "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}",
            "leaves out 1 image parts",
        ),
        (
            "{% for m in messages %}{% for c in m.content %}{% if c.type == 'image' %}<|image_pad|><|image_pad|>{% else %}"
            "{{ c.text }}{% endif %}{% endfor %}{% endfor %}",
            "writes more image placeholders than the conversation has image parts",
        ),
        (None, "the tokenizer has no chat template, so media have no place"),
    ],
)
def test_a_template_that_does_not_write_one_placeholder_for_each_medium_is_refused(
    template: str | None, problem: str
) -> None:
    renderer = with_template(setting("qwen2_5_vl"), template)
    with pytest.raises(DataError, match=problem):
        renderer.encode([message("user", "See ", image(16, 16))])


def test_placeholders_that_a_template_writes_without_media_are_refused() -> None:
    renderer = with_template(setting("qwen2_5_vl"), "{% for m in messages %}{{ m.content }}{% endfor %}<|image_pad|>")
    with pytest.raises(DataError, match="writes more image placeholders"):
        renderer.encode([text_message("user", "Hi")])


def test_a_template_that_moves_media_of_different_kinds_is_followed() -> None:
    """Sounds first, then pictures: the media come in the order of their placeholders."""
    one = setting("qwen2_5_omni")
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for c in m.content if c.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% endfor %}"
        "{% for c in m.content if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endfor %}"
        "{% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    encoded = with_template(one, template).encode([message("user", image(16, 16), audio(16_000), "?", image(24, 24))])
    assert encoded.parts == (audio(16_000), image(16, 16), image(24, 24))


# --- more turns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", tiny_media.KINDS)
def test_case_e1_media_of_a_later_turn_extend_to_what_a_full_render_gives(kind: str) -> None:
    one = setting(kind)
    history = [message("user", image(40, 24), "What?")]
    shown = one.renderer.encode(history).token_ids.tolist()
    sampled = [*shown, *ids(one, "A cat.<|im_end|>")]
    history.append(text_message("assistant", "A cat."))
    crop = message("user", "Closer: ", image(21, 37), video(32, 24, 16), "?")
    suffix = one.renderer.extend(history, np.array(sampled, np.int32), [crop])
    assert suffix is not None
    assert suffix.parts == (image(21, 37), video(32, 24, 16))
    whole = one.renderer.encode([*history, crop])
    assert [*sampled, *suffix.token_ids.tolist()] == whole.token_ids.tolist()
    assert whole.parts == (image(40, 24), *suffix.parts)
    media = media_of(one.family, whole.parts)
    assert one.family.positions(whole.token_ids, media).shape == (3, len(whole.token_ids))


def test_media_of_two_later_turns_extend_one_after_the_other() -> None:
    one = setting("qwen3_omni")
    history: list[Message] = [message("user", "Listen: ", audio(16_000))]
    context = one.renderer.encode(history).token_ids.tolist()
    for turn, part in enumerate((audio(8_000), image(24, 24))):
        context += ids(one, f"Turn {turn}.<|im_end|>")
        history.append(text_message("assistant", f"Turn {turn}."))
        suffix = one.renderer.extend(history, np.array(context, np.int32), [message("tool", part, " <|image_pad|>")])
        assert suffix is not None
        assert suffix.parts == (part,)
        context += suffix.token_ids.tolist()
        history.append(message("tool", part, " <|image_pad|>"))
    assert context == one.renderer.encode(history).token_ids.tolist()


def test_case_e11_a_history_with_another_picture_branches() -> None:
    one = setting("qwen3_vl")
    shown = one.renderer.encode([message("user", image(40, 24), "What?")]).token_ids.tolist()
    sampled = np.array([*shown, *ids(one, "A cat.<|im_end|>")], np.int32)
    edited = [message("user", image(64, 64), "What?"), text_message("assistant", "A cat.")]
    branched = one.renderer.counts["branched"]
    assert one.renderer.extend(edited, sampled, [text_message("user", "Sure?")]) is None
    assert one.renderer.counts["branched"] == branched + 1


def test_a_reply_that_holds_media_was_not_sampled() -> None:
    one = setting("qwen3_vl")
    reply = message("assistant", "Here: ", image(16, 16))
    with pytest.raises(InvariantError, match="the assistant's reply, which is text"):
        one.renderer.extend([text_message("user", "Draw."), reply], np.array([1], np.int32), [])
    # Earlier turns of a record may hold some all the same.
    encoded = one.renderer.encode([text_message("user", "Draw."), reply, text_message("user", "Again.")])
    assert counts(one, encoded.token_ids)["image"] == 4


def test_equal_texts_with_other_media_do_not_share_what_is_remembered() -> None:
    one = setting("qwen3_vl")
    small, large = (one.renderer.encode([message("user", part, "?")]) for part in (image(16, 16), image(32, 32)))
    assert [counts(one, encoded.token_ids)["image"] for encoded in (small, large)] == [4, 16]
    # The same size but another file: equal tokens, its own part.
    other = MediaPart("image", "elsewhere", "other", {}, dict(image(16, 16).facts))
    again = one.renderer.encode([message("user", other, "?")])
    assert again.token_ids.tolist() == small.token_ids.tolist()
    assert again.parts == (other,)


def test_case_f12_empty_and_mixed_contents_render_as_the_template_alone_does() -> None:
    one = setting("qwen3_omni")
    conversation = [
        message("system", ""),
        message("user", image(16, 16)),
        message("assistant", ""),
        message("tool", "", audio(16_000)),
        message("user", "", "x", "", image(16, 16), ""),
    ]
    encoded = one.renderer.encode(conversation)
    sound = f"<|audio_start|>{'<|audio_pad|>' * 13}<|audio_end|>"
    picture = f"<|vision_start|>{IMAGE * 4}<|vision_end|>"
    turns = ["system\n", f"user\n{picture}", "assistant\n", f"tool\n{sound}", f"user\nx{picture}"]
    expected = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
    assert encoded.token_ids.tolist() == ids(one, expected)


def test_case_e7_a_role_whose_content_is_always_a_list_takes_media_too() -> None:
    one = setting("qwen2_5_vl")
    template = (
        "{% for m in messages %}{% for c in m.content %}{% if c.type == 'image' %}<|image_pad|>{% else %}{{ c['text'] }}"
        "{% endif %}{% endfor %}|{% endfor %}"
    )
    renderer = with_template(one, template)
    encoded = renderer.encode([text_message("system", "S"), message("user", image(16, 16), "?")])
    assert encoded.token_ids.tolist() == ids(one, f"S|{IMAGE * 4}?|")


def test_characters_that_vanish_are_looked_for_in_texts_only() -> None:
    one = setting("qwen3_vl")
    assert one.renderer.lost_characters([message("user", "abc", image(16, 16), "d")]) == ""


def test_contents_reach_a_template_as_lists_of_parts() -> None:
    seen: list[Any] = []

    class Spy:
        chat_template = "x"

        def apply_chat_template(self, conversation: Any, **_: Any) -> str:
            seen.append(conversation)
            return "relaxprobe"

    renderer = setting("qwen3_vl").renderer
    pairs = renderer._pairs([message("user", "a", "b", image(16, 16), "c"), text_message("assistant", "d")])
    template = ChatTemplate(Spy(), {})
    template.render(pairs, False)
    assert seen[-1] == [
        {"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "image"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
    ]
