"""``headscope watch --segment``, ``--chat`` and ``--weights``, against the eager weights of the model."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from rich.console import Console

from headscope import HeadStats, Observe, Recording, Segments, load_example, masks, observe
from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.model_loading import load
from headscope.cli._shared.segment_options import locate_segments, read_segment_options
from headscope.cli._shared.segment_view import make_sections, show_segments, summarize_segments
from headscope.cli._shared.windows import windows
from support.commands import Run, answer
from support.html_pages import Page
from support.model_folders import SIZES, gpt2, save

TEXT = "one fox, two dogs, a cat. who"
DOCUMENTS = ("--segment", "first=one...", "--segment", "second=two...", "--segment", "question= who")
TURNS = "{% for each in messages %}{{ each.role }}. {{ each.content }}, {% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 that reads 29 tokens, one for each letter, after the token that starts a text."""
    return save(gpt2(), tmp_path_factory.mktemp("models") / "gpt2")


def masses(weights: torch.Tensor, ids: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums [H, S, S] and rows [S] of the mass from segment to segment, pair by pair."""
    total = torch.zeros(weights.shape[0], count, count, dtype=torch.float64)
    rows = torch.zeros(count, dtype=torch.long)
    for query, a in enumerate(ids):
        rows[a] += a >= 0
        for key, b in enumerate(ids):
            if a >= 0 and b >= 0:
                total[:, a, b] += weights[:, query, key].double()
    return total, rows


def eager_weights(folder: Path, ids: torch.Tensor) -> list[torch.Tensor]:
    """The weights [H, T, T] of each layer."""
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [layer[0] for layer in model(ids, output_attentions=True).attentions]


def places(text: str) -> list[int]:
    """The segment of each letter: up to "two", up to the question, and the question."""
    borders = text.index("two"), text.index(" who")
    return [0 if n < borders[0] else 1 if n < borders[1] else 2 for n in range(len(text))]


@pytest.mark.parametrize("context", [29, 11])
def test_segments_are_exact_also_in_windows(context: int, folder: Path, run: Run) -> None:
    ran = run("watch", str(folder), "--text", TEXT, *DOCUMENTS, "--context", str(context), "--json")
    found = answer(ran)["layers"]["transformer.h.1.attn"]["segments"]
    assert "segments in different windows do not attend to each other" in ran.err
    loaded = load(str(folder))
    assert loaded.encode is not None
    parts = windows(loaded.encode(TEXT), context, loaded.ends)
    assert len(parts) == (2 if context == 29 else 3)
    total, rows, start = torch.zeros(3, 3, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.long), 0
    for part in parts:
        ids = [-1, *places(TEXT)[start : start + part.shape[1] - 1]]  # the token that starts a text is in none
        start += part.shape[1] - 1
        of_window, of_rows = masses(eager_weights(folder, part)[1], ids, 3)
        total, rows = total + of_window, rows + of_rows
    assert found["names"] == ["first", "second", "question"]
    assert found["count"][0] == rows.tolist()
    torch.testing.assert_close(torch.tensor(found["sum"]).double(), total, rtol=1e-4, atol=1e-6)


def test_how_much_is_read_of_a_document(folder: Path, run: Run) -> None:
    """In the terminal, on the page, in JSON and in the recording."""
    text = TEXT[4:]
    where = ["--segment", "fox=fox...", "--segment", "dogs=two...", "--segment", "question= who"]
    ran = run("watch", str(folder), "--text", text, *where, "--out", "seen.safetensors")
    assert ran.code == 0, ran.err
    mean = Recording.load("seen.safetensors").stats.parts["transformer.h.0.attn"].segments
    assert mean is not None
    assert mean.names == ("fox", "dogs", "question")
    summary = answer(run("watch", str(folder), "--text", text, *where, "--json"))["segments"]
    stats = HeadStats.load("seen.safetensors")
    heads = torch.cat([stats[n].segments.mean for n in range(2)])
    torch.testing.assert_close(torch.tensor(summary["mean"]).double(), heads.mean(0), rtol=1e-5, atol=1e-7)
    assert summary["count"] == [5, 16, 4]
    best = summary["highest"][0]
    assert best["mean"] == pytest.approx(max(float(heads[:, a, b].max()) for a in range(3) for b in range(3) if a != b))
    assert re.search(r"^question +4( +[01]\.\d\d){3}$", ran.out, re.MULTILINE), ran.out
    nulls = [stats[n].segments.null for n in range(2)]
    assert None not in nulls
    even = torch.cat([null.mean for null in nulls if null is not None])
    torch.testing.assert_close(torch.tensor(summary["chance"]).double(), even.mean(0), rtol=1e-5, atol=1e-7)
    a, b = (summary["names"].index(best[each]) for each in ("query", "key"))
    assert best["chance"] == pytest.approx(float(even[0, a, b]), rel=1e-5), "that of each head is the same"
    line = f"{best['query']} +{best['key']} +[01] +{best['head']} +{best['mean']:.2f} +{best['chance']:.2f}"
    assert re.search(line, ran.out), ran.out
    titles = [
        table["title"] for table in Page(Path("headscope-report.html").read_text(encoding="utf-8")).data["tables"]
    ]
    assert titles[1:4] == ["Segments", "Segments: heads", "Segments: layers"]


def test_a_share_that_is_mostly_on_the_first_token_is_also_given_without_it() -> None:
    q, k = torch.ones(1, 2, 19, 8), torch.zeros(1, 2, 19, 8)
    k[:, 0, 0] = 1.4
    ids = [0] * 4 + [1] * 9 + [2] * 6
    names = ["system", "document", "answer"]
    stats = observe(q, k, mask=masks.causal(), what=Observe(segments=Segments(names, ids))).named("a")
    summary = summarize_segments(stats)
    assert summary is not None
    mass = stats.segments
    torch.testing.assert_close(torch.tensor(summary.without_first).double(), mass.without_first().mean(0))
    out = io.StringIO()
    show_segments(Console(file=out, width=100), summary, {"a": "0"})
    mean, rest = (float(x.mean(0)[2, 0]) for x in (mass.mean, mass.without_first()))
    assert rest < mean / 2
    sentence = f"From “answer” to “system”: {mean:.2f}, and {rest:.2f} without the first token."
    assert sentence in out.getvalue()
    assert "to “document”" not in out.getvalue(), "the first token is not in that segment"
    highest = next(each for each in summary.highest if (each.query, each.key) == ("answer", "system"))
    of_head = float(mass.without_first()[0, 2, 0])
    assert (highest.head, highest.without_first) == (0, pytest.approx(of_head))
    even = sum(4 / visible for visible in range(14, 20)) / 6
    numbers = " +".join(f"{number:.2f}" for number in (highest.mean, even, of_head))
    assert re.search(rf"^answer +system +0 +0 +{numbers} *$", out.getvalue(), re.MULTILINE), out.getvalue()
    means, by_head, _ = make_sections(summary, {"a": "0"}, "")
    assert sentence in means.caption
    assert by_head.columns[-1] == "without first"
    even = observe(0 * q, k, mask=masks.causal(), what=Observe(segments=Segments(names, ids))).named("a")
    summary = summarize_segments(even)
    assert summary is not None
    means, by_head, _ = make_sections(summary, {"a": "0"}, "")
    assert by_head.columns[-2:] == ["mass", "chance"]
    assert "“answer”" not in means.caption


def test_segments_of_a_file_are_those_of_options(folder: Path, run: Run) -> None:
    Path("places.json").write_text(json.dumps({"a": [0, 4], "b": ["fox", [9, 12]], "c": "a cat..."}), encoding="utf-8")
    by_file = answer(run("watch", str(folder), "--text", TEXT[:28], "--segments", "places.json", "--json"))
    each = ["--segment", "a=0:4", "--segment", "b=4:7", "--segment", "b=two", "--segment", "c=19:28"]
    by_option = answer(run("watch", str(folder), "--text", TEXT[:28], *each, "--json"))
    assert by_file["layers"] == by_option["layers"]
    assert by_file["segments"]["count"] == [4, 6, 9]


def test_segments_of_ids_are_in_tokens(run: Run) -> None:
    found = answer(run("watch", "text", "--ids", "5,6,7,8,9", "--segment", "a=0:2", "--segment", "b=4:5", "--json"))
    assert found["segments"]["count"] == [2, 1]
    assert found["segments"]["mean"][0][1] == 0


def test_the_shipped_model_has_offsets(run: Run) -> None:
    text = "def add(a, b):\n    return a + b\n"
    found = answer(
        run("watch", "text", "--text", text, "--segment", "signature=def...", "--segment", "body=return...", "--json")
    )
    assert sum(found["segments"]["count"]) == found["layers"]["layers.0.attention"]["rows"][0]
    assert found["segments"]["mean"][0] == [pytest.approx(1.0), 0.0]


def test_the_turns_of_a_chat(folder: Path, tmp_path: Path, run: Run) -> None:
    at = save(gpt2(), tmp_path / "chat")
    tokenizer = transformers.AutoTokenizer.from_pretrained(at)
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(at)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "tool", "content": "a b"},
        {"role": "user", "content": "ok"},
    ]
    Path("chat.json").write_text(json.dumps({"messages": messages}), encoding="utf-8")
    found = answer(run("watch", str(at), "--chat", "chat.json", "--json"))
    assert found["layers"]["transformer.h.0.attn"]["segments"]["names"] == ["user 1", "tool", "user 2"]
    assert found["segments"]["count"] == [2, 3, 2]
    length = len("user. hi, tool. a b, user. ok, ")
    assert found["about"]["options"]["input"]["tokens"] == length, "the template adds the token that starts a text"
    named = answer(run("watch", str(at), "--chat", "chat.json", "--segment", "tool=tool. a b", "--json"))
    assert named["segments"]["count"] == [9]
    ran = run("watch", str(folder), "--chat", "chat.json")
    assert (ran.code, "has no chat template; use --file" in ran.err) == (2, True)


# ---------------------------------------------------------------- regions of an image


def test_regions_of_the_shipped_images(run: Run) -> None:
    """2 x 4 regions of 8 x 8 pixels, of twenty samples."""
    found = answer(run("watch", "digits", "--segments", "2x4", "--json"))["layers"]["layers.1.attention"]["segments"]
    example = load_example("digits")
    with torch.inference_mode():
        _, weights = example.model(torch.stack([sample.image for sample in example.samples]), need_weights=True)
    ids = [4 * (n // 8 // 4) + n % 8 // 2 for n in range(64)]
    total = sum(masses(image, ids, 8)[0] for image in weights[1])
    assert found["names"][:5] == [f"image [{at}]" for at in ("0, 0", "0, 1", "0, 2", "0, 3", "1, 0")]
    assert found["count"] == [[160] * 8] * 8
    torch.testing.assert_close(torch.tensor(found["sum"]).double(), total, rtol=1e-4, atol=1e-5)


def test_the_keys_before_the_patches_are_special(tmp_path: Path, run: Run) -> None:
    sizes: dict[str, Any] = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 1}
    vit = transformers.ViTConfig(image_size=12, patch_size=4, intermediate_size=24, **sizes)
    at = save(transformers.ViTForImageClassification(vit), tmp_path / "vit", tokenizer=False)
    Image.new("RGB", (31, 17), (200, 10, 60)).save("p.png")
    found = answer(run("watch", str(at), "--image", "p.png", "--segments", "3x1", "--json"))["segments"]
    assert found["names"] == ["image [0, 0]", "image [1, 0]", "image [2, 0]", "special"]
    assert found["count"] == [3, 3, 3, 1]
    assert [sum(line) for line in found["mean"]] == [pytest.approx(1.0, abs=1e-5)] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digits", "--segments", "9x1"), "--segments: got 9x1, expected at most 8 x 8"),
        (
            ("text", "--text", "a", "--segments", "2x2"),
            "--segments: got 2x2, regions of an image, and this model reads",
        ),
        (("digits", "--segments", "no.json"), "--segments: no.json: cannot be read"),
    ],
)
def test_regions_that_do_not_fit_are_one_line(arguments: tuple[str, ...], message: str, run: Run) -> None:
    ran = run("watch", *arguments)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith(f"headscope watch: {message}")


# ---------------------------------------------------------------- weights of chosen heads


def test_weights_of_chosen_heads_are_saved(folder: Path, run: Run) -> None:
    ran = run("watch", str(folder), "--ids", "0,3,4,5,6,7", "--weights", "1:2,0", "--weights", "*.h.0:1", "--no-page",
              "--out", "seen.safetensors")  # fmt: skip
    assert ran.code == 0, ran.err
    recording = Recording.load("seen.safetensors")
    expected = eager_weights(folder, torch.tensor([[0, 3, 4, 5, 6, 7]]))
    for layer, head in ((1, 0), (1, 2), (0, 1)):
        (weights,) = recording.weights(f"transformer.h.{layer}.attn", head)
        torch.testing.assert_close(weights[0], expected[layer][head], rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="weights"):
        recording.weights("transformer.h.0.attn", 0)
    assert len(recording.layers) == 2, "the statistics of all layers are there, too"


def test_weights_of_each_window_are_saved(folder: Path, run: Run) -> None:
    run(
        "watch",
        str(folder),
        "--text",
        TEXT,
        "--context",
        "11",
        "--weights",
        "0:1",
        "--no-page",
        "--out",
        "a.safetensors",
    )
    runs = Recording.load("a.safetensors").weights("transformer.h.0.attn", 1)
    assert [list(weights.shape) for weights in runs] == [[1, 10, 10], [1, 11, 11], [1, 11, 11]]


def test_weights_that_do_not_fit_are_one_line(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscope.stats._options.GIB", 100.0)
    ran = run("watch", str(folder), "--ids", "0,3,4,5,6,7,8,9,3,4,5,6,7", "--weights", "1:2", "--out", "a.safetensors")
    assert ran.code == 2
    assert re.fullmatch(
        r"headscope watch: --weights: those of heads 2.* need .*; use --rows, fewer heads, .*\n", ran.err
    )


def test_a_file_that_weights_make_large_is_announced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["headscope.cli._commands.watch"], "LARGE", 1000)
    ran = run("watch", "text", "--text", "a b c", "--no-page", "--out", "a.safetensors", "--weights", "1:0", "--exact")
    assert re.search(r"a\.safetensors: \d+ MB; without --exact and --weights it is smaller\n", ran.err)


def test_exact_maps_keep_all_digits(folder: Path, run: Run) -> None:
    arguments = ["watch", str(folder), "--text", TEXT[:23], "--map", "full", "--no-page", "--out"]
    assert run(*arguments, "exact.safetensors", "--exact").code == 0
    assert run(*arguments, "short.safetensors").code == 0
    ids = torch.tensor([[0, *load(str(folder)).encode(TEXT[:23])]])  # type: ignore[misc]
    expected = eager_weights(folder, ids)[1].double()
    errors: list[float] = []
    for name in ("exact", "short"):
        found = HeadStats.load(f"{name}.safetensors").parts["transformer.h.1.attn"].map
        assert found is not None
        errors.append(float((found.mean.nan_to_num(0.0) - expected).abs().max()))
    assert errors[0] < 1e-6 < 5e-6 < errors[1]


# ---------------------------------------------------------------- tokens


def test_the_tokens_of_all_windows_are_saved_and_on_the_page(folder: Path, run: Run) -> None:
    ran = run("watch", str(folder), "--text", TEXT, "--context", "11", "--out", "seen.safetensors")
    assert ran.code == 0, ran.err
    about = Recording.load("seen.safetensors").about
    assert about.texts is None
    assert ["".join(texts[1:]) for texts in about.run_texts] == [TEXT[:9], TEXT[9:19], TEXT[19:]]
    assert {texts[0] for texts in about.run_texts} == {"<s>"}
    tokens = Page(Path("headscope-report.html").read_text(encoding="utf-8")).data["runTokens"]
    shown = [[tokens["labels"][n] for n in numbers[1:4]] for numbers in tokens["ids"]]
    assert shown == [["o", "n", "e"], ["t", "w", "o"], ["a", "␣", "c"]]
    again = run("report", "seen.safetensors", "--out", "again.html")
    assert again.code == 0, again.err
    assert Page(Path("again.html").read_text(encoding="utf-8")).data["runTokens"] == tokens


def test_tokens_without_a_tokenizer_are_their_ids(tmp_path: Path, run: Run) -> None:
    at = save(gpt2(), tmp_path / "bare", tokenizer=False)
    assert run("watch", str(at), "--ids", "3 4 5", "--no-page", "--out", "a.safetensors").code == 0
    assert Recording.load("a.safetensors").texts == ("3", "4", "5")


# ---------------------------------------------------------------- mistakes

MISTAKES: dict[str, tuple[list[str], str]] = {
    "no name": (["--segment", "one"], "--segment: got 'one', expected NAME=START:STOP in characters, NAME=TEXT, or"),
    "no place": (["--segment", "a="], "--segment: got 'a=', expected NAME="),
    "not there": (["--segment", "a=zebra"], "--segment: 'a': the text 'zebra' is not in the input; copy it"),
    "not unique": (["--segment", "a=o"], "'a': the text 'o' is 5 times in the input; use a longer text, or START:STOP"),
    "empty": (["--segment", "a=3:3"], r"--segment: 'a' has \(3, 3\), which is empty"),
    "beyond": (["--segment", "a=3:99"], "--segment: 'a': got 3:99, expected at most 29, the characters of the input"),
    "overlapping": (
        ["--segment", "a=3:9", "--segment", "b=5:12"], r"--segment: 'a' \(3, 9\) and 'b' \(5, 12\) overlap"
    ),
    "65 segments": (
        [part for n in range(65) for part in ("--segment", f"{n}=0:1")],
        "--segment: got 65, expected 1 to 64 different names",
    ),
    "ids and a text": (
        ["--segment", "a=one", "--ids", "3 4"], "'a': with --ids, expected START:STOP in tokens, got 'one'"
    ),
    "no file": (["--segments", "no.json"], "--segments: no.json: cannot be read: No such file"),
    "no JSON": (["--segments", "text.txt"], "--segments: text.txt: is not JSON: "),
    "a name twice": (["--segments", "twice.json"], "--segments: twice.json: .*: 'a' is there twice; expected"),
    "another form": (["--segments", "list.json"], r"--segments: list.json: expected {\"name\": \[start, stop\]"),
    "another place": (["--segments", "place.json"], "--segments: place.json: 'a': expected "),
    "no messages": (["--chat", "place.json"], r"--chat: place.json: expected \[{\"role\""),
    "two inputs": (["--chat", "place.json", "--text", "a"], "expected one input, got --text and --chat"),
    "weights without a file": (["--weights", "0:1"], "--weights: requires --out"),
    "exact without a file": (["--exact"], "--exact: requires --out"),
    "weights without heads": (["--weights", "0", "--out", "a"], "--weights: got 0, expected a layer and its heads"),
    "a head twice": (["--weights", "0:1,1", "--out", "a"], "--weights: got 0:1,1, expected each head of a layer once"),
    "no such layer": (
        ["--weights", "h.7:1", "--out", "a"],
        r"--weights: there is no layer h\.7; expected 0 to 1, or one of transformer\.h\.0\.attn, transformer\.h\.1\.",
    ),
    "no such head": (
        ["--weights", "1:3", "--out", "a"], r"--weights: layer transformer\.h\.1\.attn has no head 3; expected 0 to 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(mistake: str, folder: Path, run: Run) -> None:
    Path("text.txt").write_text("no JSON", encoding="utf-8")
    Path("list.json").write_text("[1]", encoding="utf-8")
    Path("place.json").write_text('{"a": [1, 2, 3]}', encoding="utf-8")
    Path("twice.json").write_text('{"a": [0, 2], "a": [3, 4]}', encoding="utf-8")
    arguments, message = MISTAKES[mistake]
    has_input = any(option in arguments for option in ("--ids", "--text", "--chat"))
    ran = run("watch", str(folder), *arguments, *(() if has_input else ("--text", TEXT)))
    assert (ran.code, ran.out) == (2, "")
    assert re.fullmatch(rf"headscope watch: .*{message}.*\n", ran.err), ran.err
    assert not Path("a").exists()


def test_a_tokenizer_without_offsets_is_one_line() -> None:
    def slow(text: str, return_offsets_mapping: bool = False, **_: Any) -> dict[str, Any]:
        raise NotImplementedError("return_offset_mapping is not available when using Python tokenizers")

    def other(text: str, **_: Any) -> dict[str, Any]:
        return {"offset_mapping": [(0, len(text))]}

    options = read_segment_options(["a=0:3"], None, None)
    for tokenizer, message in (
        (slow, "has no offsets of characters; use --ids, with places in tokens"),
        (other, "has offsets for 1 tokens, expected 3; use --ids, with places in tokens"),
    ):
        with pytest.raises(Mistake, match=rf"^--segment: the tokenizer of the shipped language model {message}$"):
            locate_segments(options, replace(load("text"), tokenizer=tokenizer), "abc", [1, 2, 3])


def test_segments_are_of_one_text(tmp_path: Path, run: Run) -> None:
    ran = run("watch", "digits", "--segment", "a=0:3")
    assert (ran.code, ran.err) == (2, "headscope watch: --segment: applies to text, and this model reads images\n")
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, **SIZES)
    at = save(transformers.T5ForConditionalGeneration(config), tmp_path / "t5")
    ran = run("watch", str(at), "--text", TEXT, "--segment", "a=0:3")
    assert (ran.code, "applies to one sequence, and this model has an encoder and a decoder" in ran.err) == (2, True)
