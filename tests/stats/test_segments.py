"""Segments: their constructors and errors; the mass between them merged, saved, compared and shown."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headscope
from headscope import HeadStats, Observe, Segments, attend, masks, observe
from headscope._observe.scene import sample
from headscope.comparing import Thresholds, compare
from headscope.stats import SegmentMass
from support import oracle_segments

B, H, T, D = 2, 3, 13, 5
NAMES = ("a", "b", "c")


def drawn(length: int = T, seed: int = 0) -> Tensor:
    return torch.randn(B, H, length, D, generator=torch.Generator().manual_seed(seed))


def ids(length: int = T) -> Tensor:
    return torch.randint(-1, 3, (B, length), generator=torch.Generator().manual_seed(3))


def stats_of(seed: int = 0, names: tuple[str, ...] = NAMES, **options: Any) -> HeadStats:
    q = drawn(seed=seed)
    return observe(q, q, mask=masks.causal(), what=Observe(segments=Segments(names, ids()), **options))


# ---------------------------------------------------------------- constructors


def test_spans_may_have_several_pieces() -> None:
    made = Segments.from_spans({"user": [(0, 2), (4, 5)], "model": range(2, 4)}, 6)
    assert made.names == ("user", "model")
    assert made.ids.tolist() == [0, 0, 1, 1, 0, -1]


def test_documents_take_names() -> None:
    assert Segments.from_documents(torch.tensor([0, 1, 3]), ["x", "y"]).ids.tolist() == [0, 1, 1]


def test_a_token_across_a_border_belongs_to_the_segment_with_most_of_it() -> None:
    offsets = torch.tensor([[0, 0], [0, 5], [5, 8], [8, 12], [12, 12]])
    made = Segments.from_offsets({"x": (0, 6), "y": (6, 12)}, offsets[None])
    assert made.ids.tolist() == [-1, 0, 1, 1, -1]


def test_offsets_of_a_tokenizer() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer: Any = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    text = "one two three . four ?"
    made = Segments.from_offsets({"s": (0, 15), "q": (16, 22)}, tokenizer.encode(text).offsets)
    assert made.ids.tolist() == [0, 0, 0, 0, 1, 1]


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.content is string %}{{ m.content | trim }}"
    "{% else %}{% for part in m.content %}{{ part.text }} {% endfor %}{% endif %} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": " brief or long ? "},
    {"role": "assistant", "content": [{"type": "text", "text": "long"}, {"type": "text", "text": "brief"}]},
    {"role": "user", "content": "brief"},
]


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers: Any = pytest.importorskip("transformers", reason="an optional dependency")
    words = ["?", "be", "brief", "or", "long", "<", ">", "system", "user", "assistant", "end"]
    inner: Any = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
    tokenizer.chat_template = template
    return tokenizer


def test_a_chat() -> None:
    """The content of each message, and nothing of the template; a word of an earlier message is not mistaken."""
    tokenizer = chat_tokenizer()
    made = Segments.from_chat(MESSAGES, tokenizer, add_generation_prompt=True)
    assert made.names == ("system", "user 1", "assistant", "user 2")
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    words = tokenizer.convert_ids_to_tokens(ids)
    assert len(words) == len(made.ids)
    contents = [[word for word, n in zip(words, made.ids.tolist(), strict=True) if n == m] for m in range(-1, 4)]
    assert contents[1:] == [["be", "brief"], ["brief", "or", "long", "?"], ["long", "brief"], ["brief"]]
    assert {*contents[0]} == {"<", ">", "system", "user", "assistant", "end"}
    assert Segments.from_chat(MESSAGES[:2], tokenizer, ["s", "q"]).names == ("s", "q")


def test_wrong_chats() -> None:
    tokenizer = chat_tokenizer()
    with pytest.raises(ValueError, match=r"lacks the content of message 0 \(system\)"):
        Segments.from_chat(MESSAGES, chat_tokenizer("{{ messages[1].content }}"))
    with pytest.raises(ValueError, match="message 1 has no text"):
        Segments.from_chat([MESSAGES[0], {"role": "user", "content": "  "}], tokenizer)
    with pytest.raises(ValueError, match="names: got 1, expected one for each of 4 messages"):
        Segments.from_chat(MESSAGES, tokenizer, ["a"])
    with pytest.raises(TypeError, match="messages: got str"):
        Segments.from_chat("hello", tokenizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tokenizer: got dict"):
        Segments.from_chat(MESSAGES, {})


def test_regions_of_an_image() -> None:
    """Five rows by three columns: each region has the patches of its part of both axes."""
    ids = [1, *[7] * 15, 2]
    made = Segments.from_image_tokens(ids, 7, (5, 3), parts=(2, 3), text=None)
    assert made.names[:2] == ("image [0, 0]", "image [0, 1]")
    assert len(made.names) == 6
    assert made.ids.tolist() == [-1, *[0, 1, 2] * 3, *[3, 4, 5] * 2, -1]


def test_tiles_and_a_thumbnail() -> None:
    ids = torch.tensor([[7, 7, 7, 7, 7, 7, 3, 7]])
    made = Segments.from_image_tokens(ids, 7, [(1, 3), (3, 1), (1, 1)], names=["tile 0", "tile 1", "thumbnail"])
    assert made.names == ("tile 0", "tile 1", "thumbnail", "text")
    assert made.ids.tolist() == [0, 0, 0, 1, 1, 1, 3, 2]


def test_rows_that_end_in_a_newline() -> None:
    made = Segments.from_image_tokens([7] * 6, 7, (2, 2), newlines=True)
    assert made.ids.tolist() == [0, 0, -1, 0, 0, -1]


def test_only_tiles_have_newlines() -> None:
    """As in LLaVA-NeXT: the whole image comes first, without them."""
    made = Segments.from_image_tokens([7] * 4 + [7] * 6, 7, [(2, 2), (2, 2)], newlines=[False, True])
    assert made.ids.tolist() == [0, 0, 0, 0, 1, 1, -1, 1, 1, -1]
    assert made._images == (("image 0", 2, (0, 2)), ("image 1", 2, (4, 7)))


def test_images_of_different_sizes_have_parts_of_their_own() -> None:
    ids = [7, 7, 1, 7, 7, 7, 7, 7, 7]
    made = Segments.from_image_tokens(ids, 7, torch.tensor([[1, 2], [3, 2]]), parts=[(1, 1), (3, 1)])
    assert made.names == ("image 0", "image 1 [0, 0]", "image 1 [1, 0]", "image 1 [2, 0]", "text")
    assert made.ids.tolist() == [0, 0, 4, 1, 1, 2, 2, 3, 3]


def test_each_row_of_an_image_may_be_a_run() -> None:
    made = Segments.from_image_tokens([7, 7, 1, 7, 7, 1, 7, 7], 7, (3, 2), parts=(3, 1), text=None)
    assert made.ids.tolist() == [0, 0, -1, 1, 1, -1, 2, 2]


def test_later_writes_to_the_ids_have_no_effect() -> None:
    own = torch.tensor([0, 1])
    made = Segments(["a", "b"], own)
    own[0] = 1
    made.ids[1] = 0
    assert made.ids.tolist() == [0, 1]


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "overlap": (
        lambda: Segments.from_spans({"a": (0, 3), "b": (2, 4)}, 5),
        ValueError,
        r"'a' \(0, 3\) and 'b'.*overlap",
    ),
    "empty": (lambda: Segments.from_spans({"a": (2, 2)}, 5), ValueError, r"'a' has \(2, 2\), which is empty"),
    "beyond": (lambda: Segments.from_spans({"a": (2, 6)}, 5), ValueError, "expected 0 to 5, the tokens"),
    "no span": (lambda: Segments.from_spans({"a": []}, 5), ValueError, "'a' has none"),
    "no pair": (lambda: Segments.from_spans({"a": (1, 2, 3)}, 5), TypeError, r"expected \(start, stop\)"),
    "id without a name": (lambda: Segments(["a"], [0, 1]), ValueError, "ids: got 1, expected -1"),
    "id below -1": (lambda: Segments(["a"], [-2]), ValueError, "ids: got -2"),
    "a set of names": (lambda: Segments({"a", "b"}, [0, 1]), TypeError, "names: got set, expected .* in a list"),
    "a set of names of images": (
        lambda: Segments.from_image_tokens([7, 7], 7, [(1, 1), (1, 1)], names={"a", "b"}),
        TypeError,
        "names: got set, expected a list with one for each of 2 images",
    ),
    "65 names": (lambda: Segments([str(n) for n in range(65)], [64]), ValueError, "names: got 65, expected 1 to 64"),
    "a name twice": (lambda: Segments(["a", "a"], [0]), ValueError, "different names"),
    "pairs of one name": (lambda: Segments(["a", "a/a", "a/a/a"], [0]), ValueError, "pairs differ"),
    "a str": (lambda: Segments("ab", [0]), TypeError, "names: got str"),
    "floating ids": (lambda: Segments(["a"], torch.zeros(3)), TypeError, "ids: dtype is float32"),
    "three axes": (lambda: Segments(["a"], torch.zeros(1, 2, 3).long()), ValueError, r"ids: got \[1, 2, 3\]"),
    "offsets of another text": (
        lambda: Segments.from_offsets({"a": (0, 2), "b": (5, 6)}, [(0, 2), (2, 4), (7, 9)]),
        ValueError,
        "no token belongs to 'b'",
    ),
    "offsets that end too early": (
        lambda: Segments.from_offsets({"a": (0, 9)}, [(0, 2), (2, 4)]),
        ValueError,
        "expected 0 to 4, the characters of the offsets",
    ),
    "offsets backwards": (lambda: Segments.from_offsets({"a": (0, 1)}, [(2, 1)]), ValueError, "token 0 has"),
    "a grid of another size": (
        lambda: Segments.from_image_tokens([7] * 6, 7, [(2, 2), (1, 1)]),
        ValueError,
        "grid: 2 x 2 .* 1 x 1 = 5 tokens, the sequence has 6 with id 7",
    ),
    "grids in another order": (
        lambda: Segments.from_image_tokens([*[7] * 6, 1, *[7] * 2], 7, [(1, 2), (2, 3)]),
        ValueError,
        r"grid: 'image 1' is 2 x 3, but other tokens interrupt its image tokens after 4 of 6; expected the grids in",
    ),
    "two images as one": (
        lambda: Segments.from_image_tokens([*[7] * 6, 1, *[7] * 2], 7, (4, 2)),
        ValueError,
        "grid: 'image' is 4 x 2, but other tokens interrupt its image tokens after 6 of 8",
    ),
    "parts of other images": (
        lambda: Segments.from_image_tokens([7] * 4, 7, (2, 2), parts=[(1, 1), (2, 1)]),
        ValueError,
        "parts: got 2 pairs, expected one, or one for each of 1 images",
    ),
    "no grid": (lambda: Segments.from_image_tokens([7], 7, (0, 1)), ValueError, r"grid: got \(0, 1\)"),
    "more parts than patches": (
        lambda: Segments.from_image_tokens([7] * 4, 7, (2, 2), parts=(3, 1)),
        ValueError,
        "parts: got .*at most 2 x 2",
    ),
    "names of images": (
        lambda: Segments.from_image_tokens([7] * 4, 7, (2, 2), names=["a", "b"]),
        ValueError,
        "names: got 2, expected one for each of 1 images",
    ),
    "several sequences": (
        lambda: Segments.from_image_tokens(torch.full((2, 4), 7), 7, (2, 2)),
        ValueError,
        r"ids: got \[2, 4\], expected \[K\]",
    ),
    "documents that do not ascend": (lambda: Segments.from_documents([0, 3, 3]), ValueError, "cu_seqlens: got 0, 3, 3"),
    "no documents": (lambda: Segments.from_documents(None), TypeError, "cu_seqlens: got NoneType, expected whole"),  # type: ignore[arg-type]
    "no offsets": (
        lambda: Segments.from_offsets({"a": (0, 1)}, [(None, None)]),
        TypeError,
        r"offsets: got list, expected whole numbers \[K, 2\]",
    ),
    "no tokens": (lambda: Segments.from_offsets({"a": (0, 1)}, []), ValueError, r"offsets: got \[0\], expected"),
    "ids without values": (
        lambda: Segments(["a"], torch.zeros(2, dtype=torch.long, device="meta")),
        TypeError,
        "ids: is on the meta device",
    ),
    "text for ids": (
        lambda: Segments.from_image_tokens("abc", 7, (1, 1)),  # type: ignore[arg-type]
        TypeError,
        r"ids: got str, expected whole numbers \[K\]",
    ),
    "text for names": (
        lambda: Segments.from_image_tokens([7, 7], 7, [(1, 1), (1, 1)], names="ab"),
        TypeError,
        "names: got str, expected a list with one for each of 2 images",
    ),
    "text for newlines": (
        lambda: Segments.from_image_tokens([7, 7], 7, (1, 1), newlines="yes"),  # type: ignore[arg-type]
        TypeError,
        "newlines: got str, expected True or False, or a list with one for each image",
    ),
    "numbers for newlines": (
        lambda: Segments.from_image_tokens([7, 7], 7, [(1, 1), (1, 1)], newlines=[0, 1]),  # type: ignore[list-item]
        TypeError,
        "newlines: got int, expected True or False for each image",
    ),
    "too few newlines": (
        lambda: Segments.from_image_tokens([7, 7], 7, [(1, 1), (1, 1)], newlines=[True]),
        ValueError,
        "newlines: got 1, expected True or False, or one for each of 2 images",
    ),
    "a pair without its first key": (
        lambda: Segments(["a", "b", "b/without_first"], [0]),
        ValueError,
        "names: got a, b, b/without_first, .*whose pairs differ, too, also from",
    ),
    "too many documents": (lambda: Segments.from_documents(range(70)), ValueError, "names: got 69"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_segments(what: str) -> None:
    make, error, text = WRONG[what]
    with pytest.raises(error, match=text):
        make()


def test_ids_of_another_length() -> None:
    q = drawn()
    with pytest.raises(
        ValueError, match=r"segments: ids are \[12\], expected \[K\] or \[B, K\], here \[13\] or \[2, 13\]"
    ):
        observe(q, q, what=Observe(segments=Segments(["a"], [0] * 12)))
    with pytest.raises(ValueError, match=r"query_ids are \[3\], expected \[Q\]"):
        observe(q, q, what=Observe(segments=Segments(["a"], [0] * T, [0] * 3)))


def test_cross_attention_requires_query_ids() -> None:
    with pytest.raises(ValueError, match="query_ids is missing"):
        observe(drawn(), drawn(7), kind="cross", what=Observe(segments=Segments(["a"], [0] * 7)))


def test_options_of_another_kind() -> None:
    with pytest.raises(TypeError, match=r"segments: got .*, expected a headscope.Segments"):
        Observe(segments=["a"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="received_max: got int"):
        Observe(received_max=1)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what comes out


def test_decoding_steps_add_up_to_the_whole() -> None:
    """The queries of a step have the ids of the last keys."""
    q, k = drawn(), drawn(seed=1)
    whole = observe(q, k, mask=masks.causal(), what=Observe(segments=Segments(NAMES, ids()), received_max=True))
    steps = [
        observe(
            q[:, :, i : i + 1],
            k[:, :, : i + 1],
            mask=masks.causal(),
            what=Observe(segments=Segments(NAMES, ids()[:, : i + 1]), received_max=True),
        )
        for i in range(T)
    ]
    merged = HeadStats.merge(*steps)
    assert torch.equal(merged.segments.count, whole.segments.count)
    torch.testing.assert_close(merged.segments.sum, whole.segments.sum, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(merged.received_max, whole.received_max, rtol=1e-6, atol=1e-6)


def test_attend_measures_the_same() -> None:
    q, what = drawn(), Observe(segments=Segments(NAMES, ids()), received_max=True)
    attended = attend(q, q, q, mask=masks.causal(), observe=what)
    again = attend(q, q, q, mask=masks.causal(), observe=what)  # by the fast path, where there is one
    for stats in (attended.stats, again.stats):
        assert stats is not None
        torch.testing.assert_close(stats.segments.sum, stats_of().segments.sum, rtol=1e-6, atol=1e-6)
    assert torch.equal(attended.out, headscope.attention(q, q, q, mask=masks.causal()))


def test_segments_need_no_other_statistic() -> None:
    q = drawn()
    what = Observe(row_stats=False, received=False, segments=Segments(NAMES, ids()))
    stats = observe(q, q, mask=masks.causal(), what=what)
    torch.testing.assert_close(stats.segments.sum, stats_of().segments.sum)
    with pytest.raises(ValueError, match="received: was not observed"):
        _ = stats.received


def test_the_largest_weight_needs_no_received() -> None:
    q = drawn()
    stats = observe(q, q, what=Observe(row_stats=False, received=False, received_max=True))
    p = observe(q, q, what=Observe(keep_qk=True)).tile(0, T, 0, T)
    torch.testing.assert_close(stats.received_max, p.double().amax((0, 2)), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="received: was not observed"):
        _ = stats.received


def test_a_pair_by_its_names() -> None:
    mass = stats_of().segments
    assert torch.equal(mass["b", "c"], mass.mean[:, 1, 2])
    with pytest.raises(KeyError, match="d: is not a segment; expected two of a, b, c"):
        _ = mass["d", "a"]


def test_a_merge_adds() -> None:
    one, other = stats_of(received_max=True), stats_of(1, received_max=True)
    both = one.merge(other)
    assert torch.equal(both.segments.sum, one.segments.sum + other.segments.sum)
    assert torch.equal(both.segments.count, one.segments.count + other.segments.count)
    assert torch.equal(both.received_max, torch.maximum(one.received_max, other.received_max))


def test_a_merge_requires_the_same_names() -> None:
    with pytest.raises(ValueError, match="segments: cannot merge a, b, c with a, b, d"):
        stats_of().merge(stats_of(names=("a", "b", "d")))
    q = drawn()
    with pytest.raises(ValueError, match="segments: cannot merge, only one of the two has it"):
        stats_of().merge(observe(q, q))


def test_the_shorter_maximum_is_extended() -> None:
    q = drawn()
    short = observe(q[:, :, :7], q[:, :, :7], what=Observe(received_max=True))
    whole = observe(q, q, what=Observe(received_max=True))
    both = short.merge(whole).received_max
    assert torch.equal(both[:, 7:], whole.received_max[:, 7:])
    assert torch.equal(both[:, :7], torch.maximum(short.received_max, whole.received_max[:, :7]))


def test_files_and_copies(tmp_path: Path) -> None:
    stats = stats_of(received_max=True)
    path = stats.save(tmp_path / "stats.safetensors")
    for again in (HeadStats.load(path), copy.deepcopy(stats), pickle.loads(pickle.dumps(stats)), stats.to("cpu")):
        assert again.segments.names == NAMES
        assert torch.equal(again.segments.sum, stats.segments.sum)
        assert torch.equal(again.segments.count, stats.segments.count)
        assert torch.equal(again.segments.first_sum, stats.segments.first_sum)
        assert torch.equal(again.segments.null_sums, stats.segments.null_sums)
        assert torch.equal(again.received_max, stats.received_max)


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    path = stats_of().save(tmp_path / "stats.safetensors")
    expected = [Segments(NAMES, [0, 1, 2, -1]), Segments.from_spans({"a": (0, 2)}, 3), HeadStats.load(path).segments]
    with torch.device("meta"):
        got = [Segments(NAMES, [0, 1, 2, -1]), Segments.from_spans({"a": (0, 2)}, 3), HeadStats.load(path).segments]
        kept = Segments(NAMES, expected[0].ids)
    assert torch.equal(kept.ids, expected[0].ids)
    for one, other in zip(got[:2], expected[:2], strict=True):
        assert torch.equal(one.ids, other.ids)
    assert torch.equal(got[2].sum, expected[2].sum)


def test_a_key_that_no_row_sees(tmp_path: Path) -> None:
    q = drawn()
    stats = observe(q, q, mask=masks.KeyLengths(torch.tensor([9, 11])), what=Observe(received_max=True))
    assert stats.received_max[:, 11:].isnan().all()
    assert not stats.received_max[:, :11].isnan().any()
    loaded = HeadStats.load(stats.save(tmp_path / "s.safetensors"))
    torch.testing.assert_close(loaded.received_max, stats.received_max, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------- without the first key


def weights_of(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """The weights in float64, [B, H, Q, K], of grouped heads, too."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    return logits.masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0)


def visible_pairs(kind: str, queries: int, keys: int) -> tuple[Any, Tensor]:
    """A mask, and the pairs that it makes visible, [B, 1, Q, K]."""
    i = torch.arange(queries)[:, None] + keys - queries
    j = torch.arange(keys)
    lengths = torch.tensor([keys, keys - 5])
    pairs: dict[str, tuple[Any, Tensor]] = {
        "all": (None, (i >= -1).expand(queries, keys)[None, None]),
        "causal": (masks.causal(), (j <= i)[None, None]),
        "window": (masks.window(4), ((j <= i) & (j > i - 4))[None, None]),
        "padding": (masks.causal() & masks.KeyLengths(lengths), (j <= i) & (j < lengths[:, None, None, None])),
        "left padding": (
            masks.causal() & masks.Dense((j >= torch.tensor([0, 3])[:, None])[:, None, None]),
            (j <= i) & (j >= torch.tensor([0, 3])[:, None, None, None]),
        ),
    }
    mask, visible = pairs[kind]
    return mask, visible.expand(B, 1, queries, keys)


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("groups", [1, H])
@pytest.mark.parametrize("kind", ["all", "causal", "window", "padding", "left padding"])
def test_the_mass_on_the_first_key_equals_the_sum_of_its_weights(
    kind: str, groups: int, first: int, rows: int | None
) -> None:
    q, k = drawn(seed=1), drawn(seed=2)[:, :groups]
    mask, visible = visible_pairs(kind, T, T)
    of_keys = ids()
    what = Observe(segments=Segments(NAMES, of_keys), first=first, rows=rows)
    mass = observe(q, k, mask=mask, what=what).segments
    p = weights_of(q, k, visible)
    is_real = visible.any(2)[:, 0]  # [B, K]
    is_first = is_real & (is_real.cumsum(-1) <= first)
    sampled = torch.zeros(T, dtype=torch.bool)
    sampled[list(sample(rows, T) if rows else range(T))] = True
    counted = visible.any(-1)[:, 0] & is_real & sampled  # [B, Q]
    member = torch.nn.functional.one_hot(of_keys + 1, 4)[..., 1:].double()  # [B, T, S]
    of_rows = member * counted[..., None]
    expected = torch.einsum("bhij,bia,bjc->hac", p * is_first[:, None, None], of_rows, member)
    torch.testing.assert_close(mass.first_sum, expected, rtol=1e-6, atol=1e-6)
    without = torch.einsum("bhij,bia,bjc->hac", p * ~is_first[:, None, None], of_rows, member)
    count = of_rows.sum((0, 1))[None, :, None]
    torch.testing.assert_close(mass.without_first(), without / count, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(mass.first + mass.without_first(), mass.mean, rtol=1e-6, atol=1e-9, equal_nan=True)


def test_in_cross_attention_the_first_key_is_that_of_the_context() -> None:
    q, k = drawn(7), drawn(seed=2)
    of_queries = torch.randint(-1, 3, (B, 7), generator=torch.Generator().manual_seed(5))
    what = Observe(segments=Segments(NAMES, ids(), of_queries))
    mass = observe(q, k, kind="cross", what=what).segments
    p = weights_of(q, k, torch.ones(1, 1, 7, T, dtype=torch.bool))
    expected = torch.zeros(H, 3, 3, dtype=torch.float64)
    for b in range(B):
        for i in range(7):
            if of_queries[b, i] >= 0 and ids()[b, 0] >= 0:
                expected[:, of_queries[b, i], ids()[b, 0]] += p[b, :, i, 0]
    assert expected.any()
    torch.testing.assert_close(mass.first_sum, expected, rtol=1e-6, atol=1e-6)


def test_a_first_key_without_a_segment_is_in_none() -> None:
    q = drawn()
    mass = observe(q, q, what=Observe(segments=Segments(NAMES, [-1, *[0, 1, 2] * 4]))).segments
    assert not mass.first_sum.any()
    assert torch.equal(mass.without_first(), mass.mean)
    assert mass.pairs_without_first() == {}


def test_64_segments_leave_room_for_the_first_keys() -> None:
    names, keys = [f"n{n}" for n in range(64)], 67
    of_keys = torch.arange(2 * keys).view(2, keys) % 64
    q = drawn(keys)
    mass = observe(q, q, mask=masks.causal(), what=Observe(segments=Segments(names, of_keys), first=5)).segments
    member = torch.nn.functional.one_hot(of_keys, 64).double()
    p = weights_of(q, q, torch.ones(keys, keys, dtype=torch.bool).tril()[None, None])
    torch.testing.assert_close(mass.sum, torch.einsum("bhij,bia,bjc->hac", p, member, member), rtol=1e-5, atol=1e-6)
    expected = torch.einsum("bhij,bia,bjc->hac", p[..., :5], member, member[:, :5])
    torch.testing.assert_close(mass.first_sum, expected, rtol=1e-5, atol=1e-6)


def test_merged_recordings_add_the_mass_on_first_keys() -> None:
    a, b = stats_of(), stats_of(seed=1)
    both = a.merge(b).segments
    torch.testing.assert_close(both.first_sum, a.segments.first_sum + b.segments.first_sum, rtol=0, atol=0)
    unknown = damaged(b, segments=replace(b.segments, first_sum=None))
    assert a.merge(unknown).segments.first_sum is None


def test_files_of_earlier_versions_lack_it(tmp_path: Path) -> None:
    stats = stats_of()
    old = damaged(stats, segments=replace(stats.segments, first_sum=None))
    path = old.save(tmp_path / "old.safetensors")
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    assert "0/segments/first" not in header
    mass = HeadStats.load(path).segments
    assert mass.first_sum is None
    assert torch.equal(mass.sum, stats.segments.sum)
    assert mass.pairs_without_first() == {}
    with pytest.raises(ValueError, match="the weight on the first keys is unknown"):
        mass.without_first()
    assert "without_first" not in old.to_dict()["layers"]["0"]["segments"]
    assert {each.name for head in compare(old, stats).heads for each in head.changes if "without" in each.name} == set()


def test_frames_and_comparisons_have_the_mass_without_the_first_key(monkeypatch: pytest.MonkeyPatch) -> None:
    stub: Any = types.ModuleType("pandas")  # which is optional
    stub.DataFrame = lambda lines, columns: [dict(zip(columns, line, strict=True)) for line in lines]
    monkeypatch.setitem(sys.modules, "pandas", stub)
    stats, later = stats_of(), stats_of(seed=1)
    holders = {NAMES[n] for n in ids()[:, 0].tolist() if n >= 0}
    assert 0 < len(holders) < 3
    frame = {line["name"]: line["mean"] for line in stats.to_pandas() if line["head"] == 1}
    without = {name for name in frame if name.endswith("/without_first")}
    assert without == {f"segments/{a}/{b}/without_first" for a in NAMES for b in holders}
    b = next(iter(holders))
    assert frame[f"segments/c/{b}/without_first"] == float(stats.segments.without_first()[1, 2, NAMES.index(b)])
    stored = stats.to_dict()["layers"]["0"]["segments"]["without_first"]
    assert stored == stats.segments.without_first().tolist()
    assert not [name for name in stats.flat() if "without_first" in name]
    head = next(each for each in compare(stats, later).heads if each.head == 1)
    change = next(each for each in head.changes if each.name == f"segments/c/{b}/without_first")
    assert change.before == frame[change.name]


# ---------------------------------------------------------------- what chance gives


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("groups", [1, H])
@pytest.mark.parametrize("form", ["spans", "pairs"])
@pytest.mark.parametrize("kind", ["all", "causal", "window", "padding", "left padding"])
def test_what_chance_gives_is_the_mean_over_exchanged_keys(kind: str, form: str, groups: int, rows: int | None) -> None:
    q, k = drawn(seed=1), drawn(seed=2)[:, :groups]
    mask, visible = visible_pairs(kind, T, T)
    if form == "pairs":
        mask = masks.Dense(visible)
    of_keys = ids()
    mass = observe(q, k, mask=mask, what=Observe(segments=Segments(NAMES, of_keys), rows=rows)).segments
    p = weights_of(q, k, visible)
    is_real = visible.any(2)[:, 0]
    sampled = torch.zeros(T, dtype=torch.bool)
    sampled[list(sample(rows, T) if rows else range(T))] = True
    counted = (visible.any(-1)[:, 0] & is_real & sampled)[:, None].expand(B, H, T)
    everywhere = visible.expand(B, H, T, T)
    mean, variance = oracle_segments.nulls(p, counted, of_keys, of_keys, everywhere, 3)
    assert mass.null is not None
    count = mass.count[..., None]
    torch.testing.assert_close(mass.null.mean, mean / count, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(mass.null.std, variance.sqrt() / count, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_the_spread_is_that_of_all_exchanges_of_the_keys() -> None:
    weights = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = weights.log()[None, None, :, None]
    what = Observe(segments=Segments(["a", "b"], [0, 0, 0, 1], [0]))
    mass = observe(q, k, kind="cross", scale=1.0, what=what).segments
    shares = torch.tensor([sum(each[:3]) for each in itertools.permutations(weights.tolist())])
    assert mass.null is not None
    assert float(mass.null.mean[0, 0, 0]) == pytest.approx(float(shares.mean()))
    assert float(mass.null.std[0, 0, 0]) == pytest.approx(float(shares.std(correction=0)))
    assert float(mass.z[0, 0, 0]) == pytest.approx((0.95 - 0.75) / float(shares.std(correction=0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", ["spans", "dense", "portable"])
def test_rows_that_see_one_segment_only_have_no_spread(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also where 1 / n in float32, times n, is not 1: the variance would be below 0, and a file not load."""
    seen = torch.ones(40, 40).tril().bool()
    mask = masks.causal() if form == "spans" else seen
    parts = Segments.from_spans({"a": (0, 23), "b": (23, 40)}, 40)
    for seed in range(4):
        q = drawn(40, seed).to(dtype)
        bias = torch.zeros(1, 1, 40, 40) if form == "portable" else None
        stats = observe(q, q, mask=mask, bias=bias, what=Observe(segments=parts))
        mass = stats.segments
        loaded = HeadStats.load(stats.save(tmp_path / "stats.safetensors", force=True)).segments
        torch.testing.assert_close(loaded.z, mass.z, rtol=0, atol=0, equal_nan=True)
        assert mass.null is not None
        assert mass.null_sums is not None
        assert bool((mass.null_sums[1][:, 0] == 0).all())
        assert mass.z[:, 0].isnan().all()
        assert mass.z[:, 1].isfinite().all()
        torch.testing.assert_close(mass.null.mean[:, 0], torch.tensor([[1.0, 0.0]] * H).double(), rtol=1e-6, atol=0)


def test_files_with_a_variance_just_below_0_load(tmp_path: Path) -> None:
    stats = stats_of()
    nulls = stats.segments.null_sums
    assert nulls is not None
    nulls = nulls.clone()
    nulls[1, 0, 0, 0] = -1e-7
    earlier = damaged(stats, segments=replace(stats.segments, null_sums=nulls))
    mass = HeadStats.load(earlier.save(tmp_path / "stats.safetensors")).segments
    assert mass.null_sums is not None
    assert float(mass.null_sums.min()) == 0


def test_with_sinks_chance_gives_less() -> None:
    q = drawn()
    sinks = torch.tensor([1.0, 2.0, 3.0])
    mass = observe(q, q, sinks=sinks, what=Observe(segments=Segments(NAMES, [0, 1] * 6 + [2]))).segments
    assert mass.null is not None
    rows = observe(q, q, sinks=sinks, what=Observe(segments=Segments(["x"], [0] * T)))
    total = rows["mass"].mean.reshape(H)
    assert bool((total < 0.95).all())
    one = rows.segments.null
    assert one is not None
    torch.testing.assert_close(one.mean[:, 0, 0], total, rtol=1e-6, atol=0)


def test_even_rows_have_no_z_and_random_ones_a_small_one() -> None:
    q = torch.zeros(1, 1, T, D)
    what = Observe(segments=Segments(NAMES, [0, 1] * 6 + [2]))
    mass = observe(q, q, mask=masks.causal(), what=what).segments
    assert mass.z.isnan().all()
    assert mass.null is not None
    torch.testing.assert_close(mass.null.mean, mass.mean, rtol=1e-6, atol=1e-6)
    random = Observe(segments=Segments(NAMES, ids()))
    drawings = [(drawn(seed=seed), drawn(seed=seed + 100)) for seed in range(40)]
    z = torch.cat([observe(q, k, mask=masks.causal(), what=random).segments.z.flatten() for q, k in drawings])
    assert float((z.nan_to_num(0.0).abs() > 3).double().mean()) < 0.02


def test_nulls_are_merged_and_unknown_without_rows_or_in_old_files(tmp_path: Path) -> None:
    a, b = stats_of(), stats_of(seed=1)
    both = a.merge(b).segments
    assert both.null_sums is not None
    assert torch.equal(both.null_sums, a.segments.null_sums + b.segments.null_sums)
    old = damaged(a, segments=replace(a.segments, null_sums=None))
    mass = HeadStats.load(old.save(tmp_path / "old.safetensors")).segments
    assert mass.null is None
    assert mass.z.isnan().all()
    assert old.merge(b).segments.null is None
    assert stats_of(row_stats=False).segments.null is None


def damaged(stats: HeadStats, **parts: Any) -> HeadStats:
    return HeadStats({name: replace(part, **parts) for name, part in stats.parts.items()})


def test_impossible_numbers_in_a_file_are_refused(tmp_path: Path) -> None:
    stats = stats_of(received_max=True)
    mass = stats.segments
    heavy = SegmentMass(NAMES, mass.sum * 3, mass.count)
    many = SegmentMass(NAMES, mass.sum, mass.count + 10_000)
    assert mass.null_sums is not None
    unlikely = SegmentMass(NAMES, mass.sum, mass.count, null_sums=mass.null_sums + mass.count[..., None])
    more = SegmentMass(NAMES, mass.sum, mass.count, first_sum=mass.sum * 1.1)
    for part, text in (
        ({"segments": heavy}, "segments/sum"),
        ({"segments": many}, "segments/count"),
        ({"segments": more}, "segments/first"),
        ({"segments": unlikely}, "segments/nulls"),
        ({"received_max": stats.received_max + 1}, "received_max"),
    ):
        path = damaged(stats, **part).save(tmp_path / "wrong.safetensors", force=True)
        with pytest.raises(ValueError, match=text):
            HeadStats.load(path)


def test_tables_trackers_and_dictionaries() -> None:
    stats = stats_of()
    name, mass = "segments/b/c", stats.segments
    assert stats.flat()[f"attn/L00/H01/{name}"] == pytest.approx(float(mass["b", "c"][1]))
    stored = stats.to_dict()["layers"]["0"]["segments"]
    assert stored["names"] == [*NAMES]
    assert stored["mean"][1][1][2] == pytest.approx(float(mass["b", "c"][1]))
    table = stats.table(sort=name, names=["entropy"])
    assert table.columns[3].header == name
    assert table.row_count == H
    with pytest.raises(ValueError, match="sort: got 'segments/b/d'"):
        stats.table(sort="segments/b/d")


def test_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    stub: Any = types.ModuleType("pandas")  # which is optional
    stub.DataFrame = lambda lines, columns: [dict(zip(columns, line, strict=True)) for line in lines]
    monkeypatch.setitem(sys.modules, "pandas", stub)
    stats = stats_of()
    lines = [line for line in stats.to_pandas() if line["name"] == "segments/b/c"]
    assert [line["head"] for line in lines] == [*range(H)]
    assert [line["mean"] for line in lines] == stats.segments["b", "c"].tolist()
    assert [line["count"] for line in lines] == stats.segments.count[:, 1].tolist()
    assert math.isnan(lines[0]["std"])


def test_a_segment_without_rows_is_left_out() -> None:
    q = drawn()
    stats = observe(q, q, what=Observe(segments=Segments(["a", "b"], [0] * T)))
    assert stats.segments.mean[:, 1].isnan().all()
    assert "attn/L00/H00/segments/b/a" not in stats.flat()
    assert stats.to_dict()["layers"]["0"]["segments"]["mean"][0][1] == [None, None]


def test_a_change_between_segments_is_found() -> None:
    k = drawn()
    towards = k.clone()
    towards[:, 1] *= 40  # head 1 becomes sharp
    what = Observe(segments=Segments(NAMES, ids()))
    before, after = (observe(x, x, what=what) for x in (k, towards))
    comparison = compare(before, after, Thresholds(share=0.02))
    moved = {name for head in comparison.moved for name in head.moved if name.startswith("segments/")}
    assert moved
    assert {head.head for head in comparison.moved} == {1}
    change = next(each for each in comparison.moved[0].changes if each.name in moved)
    a, b = change.name.split("/")[1:]
    assert change.change == pytest.approx(float(after.segments[a, b][1] - before.segments[a, b][1]))
    assert math.isnan(change.error)
    assert any(change.name in cells for cells in comparison.cells())


def test_other_segments_are_named() -> None:
    comparison = compare(stats_of(), stats_of(names=("a", "b", "d")))
    assert "Different segments: a, b, c before, a, b, d after" in comparison.notes
    q = drawn()
    assert "segments of 0" in compare(stats_of(), observe(q, q)).only_before


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Document 1: Paris is big.\nDocument 2: Berlin is old.\nWhich is old?"},
]
DOCUMENTS = {"document 1": "Paris is big.", "document 2": "Berlin is old."}


class Characters:
    """A tokenizer of transformers whose tokens are characters."""

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        assert not tokenize
        return "".join(f"<{each['role']}>{each['content']}" for each in messages)

    def __call__(self, text: str, add_special_tokens: bool, return_offsets_mapping: bool) -> dict[str, Any]:
        assert return_offsets_mapping
        assert not add_special_tokens
        return {"offset_mapping": [(n, n + 1) for n in range(len(text))]}


def test_parts_of_a_message_have_segments_of_their_own() -> None:
    text = Characters().apply_chat_template(CHAT, tokenize=False)
    segments = Segments.from_chat(CHAT, Characters(), parts=DOCUMENTS)
    assert segments.names == ("system", "user", "document 1", "document 2")
    found = ["".join(text[n] for n in (segments.ids == place).nonzero()[:, 0]) for place in range(4)]
    assert found == [CHAT[0]["content"], "Document 1: \nDocument 2: \nWhich is old?", *DOCUMENTS.values()]
    whole = Segments.from_chat(CHAT, Characters(), ["system", "prompt"], parts={"user": CHAT[1]["content"]})
    assert whole.names == ("system", "user")  # the part leaves nothing of "prompt"
    two = [{"role": "user", "content": "One.\n\nTwo."}]
    assert Segments.from_chat(two, Characters(), parts={"1": "One.", "2": "Two."}).names == ("1", "2")


@pytest.mark.parametrize(
    ("begin", "end", "content"),
    [
        ("Today: 26 Jul 2024. ", "", "2"),  # in the date
        ("", "", "user"),  # in the header of the message itself
        ("", "</user>\n", "</user>\n</user>"),
    ],
)
def test_a_content_that_the_template_has_too_is_not_mistaken(
    begin: str, end: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(_: Any, messages: list[dict[str, str]], tokenize: bool) -> str:
        return begin + "".join(f"<{each['role']}>{each['content']}{end}" for each in messages)

    monkeypatch.setattr(Characters, "apply_chat_template", render)
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]
    made = Segments.from_chat(chat, Characters())
    before = len(begin) + len("<user>")
    after = before + len(content) + len(end) + len("<assistant>")
    assert (made.ids == 0).nonzero()[:, 0].tolist() == [*range(before, before + len(content))]
    assert (made.ids == 1).nonzero()[:, 0].tolist() == [after]


def test_a_template_that_reads_the_content_is_refused_where_it_is_ambiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template with other contents does not show the places of these."""

    def render(_: Any, messages: list[dict[str, str]], tokenize: bool) -> str:
        return f"{len(messages[0]['content'])} characters by the user: {messages[0]['content']}"

    monkeypatch.setattr(Characters, "apply_chat_template", render)
    plain = Segments.from_chat([{"role": "user", "content": "A question"}], Characters())
    assert (plain.ids == 0).nonzero()[:, 0].tolist() == [*range(27, 37)]
    with pytest.raises(ValueError, match=r"has the content of message 0 \(user\) more than once, and the template"):
        Segments.from_chat([{"role": "user", "content": "user"}], Characters())


def test_wrong_messages_are_named() -> None:
    refused: list[tuple[Any, type[Exception], str]] = [
        (["hello"], TypeError, "messages: got str in the list, expected a list of mappings"),
        ([{"role": "tool", "content": None}], ValueError, "messages: message 0 has no text"),
        ([{"role": role, "content": role} for role in ("a", "a", "a 1")], ValueError, "names: got a 1, a 2, a 1"),
    ]
    for messages, error, match in refused:
        with pytest.raises(error, match=match):
            Segments.from_chat(messages, Characters())


def test_pieces_of_a_text_are_segments() -> None:
    text = "Paris is big. Berlin is old."
    offsets = [(n, n + 1) for n in range(len(text))]
    segments = Segments.from_offsets({"first": "Paris is big.", "second": (14, 28)}, offsets, text)
    assert torch.equal(segments.ids, Segments.from_offsets({"first": (0, 13), "second": (14, 28)}, offsets).ids)
    cases: list[tuple[dict[str, Any], list[Any], str]] = [
        ({"a": "Rome"}, offsets, r"spans: 'a': the text lacks 'Rome'; expected a piece of the text as it was"),
        ({"a": "is"}, offsets, r"spans: 'a': the text has 'is' 3 times; expected once: pass more of it"),
        ({"a": ""}, offsets, r"spans: 'a': the text lacks ''; expected a piece"),
        ({"a": "big"}, [*offsets, (28, 29)], r"offsets: end at character 29, the text has 28; expected those of this"),
    ]
    for spans, wrong, match in cases:
        with pytest.raises(ValueError, match=match):
            Segments.from_offsets(spans, wrong, text)
    with pytest.raises(ValueError, match="the text has 'aa' 2 times"):
        Segments.from_offsets({"a": "aa"}, [(0, 3)], "aaa")  # of which str.count finds one
    refused: list[tuple[Any, type[Exception], str]] = [
        ({"user": "Paris is big."}, ValueError, r"parts: 'user' is the name of a message, too"),
        ({"a": "is"}, ValueError, r"parts: 'a': the text has 'is' 4 times"),
        ({"a": "<user>"}, ValueError, r"parts: 'a': '<user>' is in no message, or in two"),
        ({"a": CHAT[0]["content"] + "<user>"}, ValueError, r"parts: 'a': '.*<user>' is in no message, or in two"),
        ({"a": (0, 3)}, TypeError, r"parts: 'a': got tuple, expected a piece of the text"),
        (["a"], TypeError, r"parts: got list, expected a mapping"),
    ]
    for parts, error, match in refused:
        with pytest.raises(error, match=match):
            Segments.from_chat(CHAT, Characters(), parts=parts)


def test_a_tokenizer_without_offsets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Characters, "__call__", lambda *_, **__: {"input_ids": [1]})
    with pytest.raises(ValueError, match=r"tokenizer: Characters has no offsets; expected a fast one"):
        Segments.from_chat(CHAT, Characters())


def test_the_frames_of_a_grid_are_named() -> None:
    with pytest.raises(ValueError, match=r"grid: got \[1, 4, 6\], expected \(rows, columns\).*drop the frames"):
        Segments.from_image_tokens([9] * 24, 9, torch.tensor([[1, 4, 6]]))
