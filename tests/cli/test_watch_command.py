"""``headscope watch`` and ``text --model``: what they show of shipped models and of Hugging Face's, and of mistakes."""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from PIL import Image

from headscope import HeadStats, Recording, observe
from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.model_loading import load
from headscope.cli._shared.windows import windows
from headscope.report.page import MARKER
from headscope.stats import head_means, row_statistics
from support.commands import Run, answer
from support.html_pages import Page
from support.model_folders import SIZES, gpt2, save
from support.processes import POSIX, STRIKE, headscope, names

TEXT = "the quick brown fox jumps over the lazy dog, the quick brown fox jumps."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 that reads 29 tokens."""
    return save(gpt2(), tmp_path_factory.mktemp("models") / "gpt2")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


Start = Callable[..., Any]


@pytest.fixture
def start(run: Run) -> Start:
    """Run ``watch`` for its JSON."""
    return lambda *arguments: answer(run("watch", *map(str, arguments), "--json"))


# ---------------------------------------------------------------- what is seen


def test_a_long_text_is_read_in_windows_and_merged_exactly(folder: Path, start: Start) -> None:
    """Against the weights that transformers' eager code returns, window by window."""
    said = start(folder, "--text", TEXT)
    loaded = load(str(folder))
    assert loaded.encode is not None
    parts = windows(loaded.encode(TEXT), 29, loaded.ends)
    assert [part.shape[1] for part in parts] == [24, 25, 25]
    assert all(part[0, 0] == 0 for part in parts), "each has the token that starts a text"
    eager = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    rows: list[dict[str, torch.Tensor]] = []
    for part in parts:
        with torch.inference_mode():
            weights = eager(part, output_attentions=True).attentions[1]
        seen = torch.ones(weights.shape[-2:]).tril().bool()
        rows.append(row_statistics(weights, seen=seen, tokens=part, windows=(3,)))
    wanted = head_means({name: torch.cat([each[name] for each in rows], -1) for name in rows[0]})
    layer = said["layers"]["transformer.h.1.attn"]
    for head in range(3):
        for name in wanted.mean:
            got = layer["heads"][head][name]
            assert got["count"] == int(wanted.rows[name][head]), name
            mean = pytest.approx(float(wanted.mean[name][head]), rel=1e-4, abs=1e-6) if got["count"] else None
            assert got["mean"] == mean, name
    assert said["about"]["options"]["input"]["windows"] == 3
    assert said["about"]["forwards"] == 3
    assert said["kv_budget"]["pooled"] is True
    assert said["notes"] == [
        "the text is read in 3 windows of 24 or 25 tokens, special tokens included, each from position 0; their "
        "statistics are merged"
    ]


def test_transformers_has_nothing_to_say_of_a_long_text(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    shutil.copytree(folder, tmp_path / "short")
    config = tmp_path / "short" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_max_length": 20}))
    loaded = load(str(tmp_path / "short"))
    assert loaded.encode is not None
    assert loaded.context == 20
    logging.getLogger("transformers").addHandler(handler)
    try:
        assert len(loaded.encode(TEXT)) > 20
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert said == []


def test_windows_are_even_and_hold_every_token_once() -> None:
    parts = windows(list(range(23)), 11, ([90], [91, 92]))
    assert [part.tolist()[0] for part in parts] == [
        [90, *range(7), 91, 92],
        [90, *range(7, 15), 91, 92],
        [90, *range(15, 23), 91, 92],
    ]
    assert [part.shape for part in windows([5], 7, ([], []))] == [(1, 1)]
    with pytest.raises(Mistake, match=r"--context: got 3, expected more than the 3 tokens of the ends"):
        windows([1], 3, ([90], [91, 92]))


def test_what_is_printed_and_written(run: Run, folder: Path) -> None:
    Path("dog.txt").write_text(TEXT[:24], encoding="utf-8")
    ran = run("watch", str(folder), "--file", "dog.txt", "--out", "seen.safetensors")
    assert ran.code == 0, ran.err
    assert "GPT2LMHeadModel" in ran.out
    assert "Input: dog.txt, 24 tokens." in ran.out
    assert len(re.findall(r"^[01] +[012] +(?:\w+|–) +[01]\.\d\d ", ran.out, re.MULTILINE)) == 6, "a line for each head"
    for word in ("Layers: transformer.h.*.attn.", "Streaming:", "Cache:", "Near-duplicates:", "seen.safetensors"):
        assert word in ran.out
    assert all(len(line) <= 80 for line in ran.out.splitlines() if "browser" not in line)
    assert ran.err == ""
    recording = Recording.load("seen.safetensors")
    assert recording.layers == ("transformer.h.0.attn", "transformer.h.1.attn")
    assert recording.texts == ("<s>", *TEXT[:24])
    page = Path("headscope-report.html").read_text(encoding="utf-8")
    assert MARKER in page[:256]
    assert "window: smallest one that holds 95% of the mass, together with the first token" in page
    tables = Page(page).data["tables"]
    assert [table["title"] for table in tables if table["cells"]] == [
        "Every head", "Patterns", "Streaming", "Smaller caches"
    ], "no two heads are near-duplicates"  # fmt: skip
    assert sorted(path.name for path in Path().iterdir()) == ["dog.txt", "headscope-report.html", "seen.safetensors"]
    assert run("watch", str(folder), "--text", "a", "--out", "seen.safetensors").code == 0, "its own files are replaced"


def test_rows_are_verified_in_every_window(run: Run, start: Start, folder: Path) -> None:
    about = start(folder, "--text", TEXT, "--verify", "5")["about"]
    assert [each["rows"] for each in about["verified"].values()] == [15, 15], "5 in each of 3 windows"
    for each in about["verified"].values():
        assert 0 < each["output"] < each["output_bound"] < 1e-4
        assert 0 < each["statistics"] < each["statistics_bound"] < 1e-4
    ran = run("watch", str(folder), "--text", TEXT[:20], "--verify", "5", "--out", "seen.safetensors")
    assert "Verified: 10 rows of 2 layers against float64; no error beyond rounding." in " ".join(ran.out.split())
    assert [each.rows for each in Recording.load("seen.safetensors").about.verified.values()] == [5, 5]
    assert "10 rows of 2 layers against float64" in Path("headscope-report.html").read_text(encoding="utf-8")
    assert run("watch", str(folder), "--text", "a", "--verify", "0").code == 2


def test_layers_without_a_softmax_are_named(run: Run, tmp_path: Path) -> None:
    config = transformers.Lfm2Config(
        **SIZES, hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, layer_types=["conv", "full_attention"], block_multiple_of=8,
    )  # fmt: skip
    at = save(transformers.Lfm2ForCausalLM(config), tmp_path / "hybrid", tokenizer=False)
    ran = run("watch", str(at), "--ids", "3 4 5 6")
    assert ran.code == 0, ran.err
    words = " ".join(ran.out.split())
    assert "Other layers: 1 layer, such as model.layers.0.conv (Lfm2ShortConv: a convolution over tokens" in words


def test_the_shipped_models(start: Start) -> None:
    said = start("text", "--text", "def parse(line): return line. def parse(line): return line.")
    assert len(said["layers"]) == 6
    best = {(each["layer"], each["head"]): each for each in said["patterns"]["scores"] if each["pattern"] == "previous"}
    assert best["layers.2.attention", 0]["score"] > 0.9, "the previous-token head"
    assert best["layers.2.attention", 0]["exact"] is True
    assert (said["page"], said["recording"], said["comparison"]) == (None, None, None)
    digits = start("digits")
    assert digits["streaming"] is None
    assert digits["layers"]["layers.0.attention"]["rows"] == [20 * 64] * 8
    assert "follow the sequence of patches, not their grid" in digits["notes"][0]


def test_encoders_with_decoders_grouped_heads_and_images(tmp_path: Path, start: Start) -> None:
    plain: dict[str, Any] = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 1}
    t5 = transformers.T5Config(
        d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, decoder_start_token_id=0, **SIZES
    )
    said = start(save(transformers.T5ForConditionalGeneration(t5), tmp_path / "t5"), "--text", TEXT)
    assert set(said["about"]["kinds"].values()) == {"self", "cross"}
    assert len(said["layers"]) == 3
    assert "shifted by one" in said["notes"][0]
    llama = transformers.LlamaConfig(num_key_value_heads=2, intermediate_size=24, **plain, **SIZES)
    said = start(save(transformers.LlamaForCausalLM(llama), tmp_path / "llama"), "--ids", "3 4,5, 6", "--rows", 2)
    assert [each["name"] for each in said["kv_budget"]["heads"][4:]] == ["kv 0 (heads 0-1)", "kv 1 (heads 2-3)"]
    assert said["patterns"]["basis"]["sampled"] is True
    vit = transformers.ViTConfig(image_size=12, patch_size=4, intermediate_size=24, **plain)
    Image.new("RGB", (31, 17), (200, 10, 60)).save("p.png")
    at = save(transformers.ViTForImageClassification(vit), tmp_path / "vit", tokenizer=False)
    (at / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}')
    said = start(at, "--image", "p.png")
    assert next(iter(said["layers"].values()))["rows"] == [10] * 4
    assert said["notes"][0].endswith("size: is missing: the picture is scaled to the model's 12 x 12")


def test_every_row_of_layers_that_share_keys_is_seen(tmp_path: Path, start: Start) -> None:
    """Of these layers a model need not compute the rows whose logits nobody asks for."""
    config = transformers.Gemma4TextConfig(
        **SIZES, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, head_dim=6,
        num_key_value_heads=1, layer_types=["full_attention"] * 2, num_kv_shared_layers=1,
        vocab_size_per_layer_input=SIZES["vocab_size"], hidden_size_per_layer_input=4,
    )  # fmt: skip
    at = save(transformers.Gemma4ForCausalLM(config), tmp_path / "gemma4", tokenizer=False)
    layers = start(at, "--ids", "3,4,5,6,7")["layers"].values()
    assert [layer["rows"] for layer in layers] == [[5, 5]] * 2


def test_little_text_tells_nothing_of_windows(run: Run, start: Start) -> None:
    said = start("text", "--ids", "5,6,7,8,9")
    assert said["streaming"] is None
    assert "window_3" in said["layers"]["layers.0.attention"]["heads"][0], "local is told by it"
    assert start("text", "--ids", "5,6,7,8,9,10,11,12,13")["streaming"] is not None
    one = run("watch", "text", "--ids", "5", "--no-page").out
    assert "1 key holds 100%" in one
    assert "Streaming" not in one


def test_some_layers_and_less_context(folder: Path, start: Start) -> None:
    said = start(folder, "--text", TEXT, "--layers", "transformer.h.1", "--context", 11)
    assert list(said["layers"]) == ["transformer.h.1.attn"]
    assert said["about"]["options"]["input"]["windows"] == 8


@pytest.mark.parametrize(("bins", "expected"), [("full", 9), ("5", 5), ("11", 9), (None, 9)])
def test_a_map_has_a_cell_for_each_token_at_most(bins: str | None, expected: int, tmp_path: Path, start: Start) -> None:
    options = () if bins is None else ("--map", bins)
    start("text", "--ids", "5,6,7,8,9,10,11,12,13", "--out", tmp_path / "a.safetensors", *options)
    stats = HeadStats.load(tmp_path / "a.safetensors")
    assert {part.map.bins for part in stats.parts.values() if part.map is not None} == {expected}


def test_a_full_map_of_the_shipped_images_has_each_pixel(tmp_path: Path, start: Start) -> None:
    start("digits", "--map", "full", "--out", tmp_path / "a.safetensors")
    part = next(iter(HeadStats.load(tmp_path / "a.safetensors").parts.values()))
    assert part.map is not None
    assert part.map.bins == 64


def test_a_large_recording_is_announced_before_it_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["headscope.cli._commands.watch"], "LARGE", 1_000_000)
    path = tmp_path / "a.safetensors"
    ran = run("watch", "text", "--text", TEXT * 3, "--no-page", "--out", str(path), "--keep-qk")
    announced = re.search(r"a\.safetensors: (\d+) MB; without --keep-qk it is smaller\n", ran.err)
    assert announced is not None
    assert abs(path.stat().st_size / 1e6 - int(announced[1])) < 1.5


def test_a_window_is_shorter_where_all_weights_are_computed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.GPTJConfig(n_positions=29, n_embd=24, n_layer=1, n_head=3, rotary_dim=4, **SIZES)
    written = save(transformers.GPTJForCausalLM(config), tmp_path / "written")
    monkeypatch.setattr("headscope.cli._shared.model_loading.find_limit", lambda *_: 100_000)
    sizes = [(loaded.context, loaded.limit) for loaded in (load(str(folder)), load(str(written)))]
    assert sizes == [(32768, 100_000), (4096, 100_000)]


def test_many_heads_are_cut_in_the_terminal(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscope.cli._shared.recording_view.LINES", 2)
    ran = run("watch", str(folder), "--text", "abc abc", "--no-page")
    assert "Shown: the 2 most striking heads of 6. The page shows all." in ran.out
    assert len(re.findall(r"^[01] +[012] +[\w–]+ +[01]\.\d\d ", ran.out, re.MULTILINE)) == 2


def test_informative_heads_are_not_cut(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscope.cli._shared.recording_view.LINES", 2)
    out = run("watch", "text", "--text", "The cat sat on the mat. The cat sat on the mat.", "--no-page").out
    table = re.findall(r"^(\d) +(\d) (\w+(?: · \w+)?) +[01]\.\d\d ", out, re.MULTILINE)
    assert table == [("2", "0", "previous"), ("3", "3", "induction · first")], "not the 25 uniform ones"


def test_watch_prints_its_highlights_first_and_has_them_as_json(run: Run) -> None:
    arguments = ("watch", "text", "--text", "The cat sat on the mat. The cat sat on the mat.")
    found = json.loads(run(*arguments, "--json").out)["highlights"]
    assert [each["pattern"] for each in found] == ["induction", "previous", "first", "uniform"]
    out = run(*arguments, "--no-page").out
    assert out.index("What to look at first") < out.index("All heads")
    assert all(f"• {each['sentence']}." in out for each in found)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h.1.attn.c_attn.bias", "30 rows of heads hold NaN or infinity and are in no figure: in layer 1."),
        ("wpe.weight", "60 rows of heads hold NaN or infinity and are in no figure: in layers 0, 1."),
    ],
)
def test_broken_rows_are_counted_and_nothing_is_told_of_none(
    name: str, said: str, run: Run, folder: Path, tmp_path: Path
) -> None:  # fmt: skip
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    with torch.no_grad():
        model.transformer.get_parameter(name).fill_(torch.nan)
    model.save_pretrained(tmp_path / "broken")
    out = run("watch", str(tmp_path / "broken"), "--ids", "3,4,5,6,7,8,9,10,11,12", "--no-page").out
    assert said in out
    assert ("Cache: on average over heads, the best 2 keys hold" in out) == ("Cache:" in out) == (name != "wpe.weight")
    assert ("Streaming:" in out) == (name != "wpe.weight")
    ran = run("watch", str(tmp_path / "broken"), "--ids", "3,4,5,6,7,8,9,10,11,12", "--json")
    assert answer(ran)["notes"] == [said.removesuffix(".")]
    assert ran.err == f"headscope watch: {said.removesuffix('.')}\n"
    assert "NaN" not in run("watch", str(folder), "--ids", "3,4", "--no-page").out


# ---------------------------------------------------------------- comparing


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The same model but for one head of layer 1, whose queries are turned around."""
    model = gpt2()
    at = save(model, tmp_path / "other")
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.transformer.h[1].attn.c_attn.weight[:, 8:16] *= -1
    changed.save_pretrained(at)
    return at


def test_against_an_older_recording(run: Run, folder: Path, other: Path) -> None:
    watched = ("watch", str(folder), "--text", TEXT[:28])
    assert run(*watched, "--out", "old.safetensors", "--no-page").code == 0
    same = run(*watched, "--against", "old.safetensors", "--no-page")
    assert same.code == 0
    assert "0 of 6 heads moved." in same.out
    moved = run("watch", str(other), *watched[2:], "--against", "old.safetensors")
    assert moved.code == 1
    assert "1 of 6 heads moved." in moved.out
    page = Page(Path("headscope-report.html").read_text(encoding="utf-8"))
    assert (page.data["tables"][0]["title"], page.data["tables"][0]["says"]) == ("What moved", "Since old.safetensors.")
    assert "since old.safetensors" in moved.out
    ran = run("watch", str(other), *watched[2:], "--against", "old.safetensors", "--json")
    said = json.loads(ran.out)["comparison"]
    assert (ran.code, said["differs"], said["moved"]) == (1, True, 1)
    assert [head["head"] for head in said["heads"] if head["moved"]] == [1]
    loose = [f"--threshold={name}=99" for name in ("share", "entropy", "logits", "ratio", "map", "received")]
    assert run("watch", str(other), *watched[2:], "--against", "old.safetensors", "--json", *loose).code == 0
    ran = run("watch", str(folder), "--text", TEXT[:27], "--against", "old.safetensors", "--json")
    assert "the input differs from that of old.safetensors" in ran.err
    HeadStats.load("old.safetensors").save("stats.safetensors")
    assert run(*watched, "--against", "stats.safetensors", "--json").code == 0, "statistics alone will do"
    foreign = run("watch", "text", "--text", "a", "--against", "old.safetensors", "--no-page")
    assert (foreign.code, foreign.out, foreign.err.count("\n")) == (2, "", 1)
    assert foreign.err.startswith(
        "headscope watch: --against: old.safetensors: after: has a different architecture from before; expected "
    )


def test_a_recording_compares_itself(run: Run, folder: Path) -> None:
    run("watch", str(folder), "--text", TEXT[:28], "--out", "old.safetensors", "--json")
    recording = Recording.load("old.safetensors")
    assert not recording.compare(recording).differs
    assert len(recording.compare(recording.stats).heads) == 6


# ---------------------------------------------------------------- mistakes

MISTAKES: dict[str, tuple[list[str], str]] = {
    "no model": (["watch"], "Missing argument 'MODEL'"),
    "no input": (["watch", "text"], "expected an input: --text, --file or --ids"),
    "two inputs": (["watch", "text", "--text", "a", "--ids", "3"], "expected one input, got --text and --ids"),
    "an image for a reader": (["watch", "text", "--image", "p.png"], "--image: this model reads text"),
    "a text for a viewer": (["watch", "digits", "--text", "a"], "--text: this model reads images"),
    "no picture": (["watch", "digits", "--image", "given.txt"], "given.txt: not a readable picture"),
    "empty text": (["watch", "text", "--text", ""], "text: is empty"),
    "missing file": (["watch", "text", "--file", "no.txt"], "no.txt: cannot be read"),
    "ids in words": (["watch", "text", "--ids", "3 x"], "--ids: got x, expected whole numbers from 0"),
    "no ids": (["watch", "text", "--ids", " ,"], "--ids: expected whole numbers such as 5,7,9, got none"),
    "unknown ids": (["watch", "text", "--ids", "2048"], "--ids: got 2048, expected 0 to 2047"),
    "no such layers": (
        ["watch", "text", "--text", "a", "--layers", "zork"],
        "layers: 'zork' does not match any module",
    ),
    "rows": (["watch", "text", "--text", "a", "--rows", "0"], "--rows: got 0, expected a whole number from 1"),
    "context": (
        ["watch", "text", "--text", "a", "--context", "257"],
        "--context: got 257, expected at most 256, the context of the model",
    ),
    "a context for pictures": (
        ["watch", "digits", "--context", "3"],
        "--context: applies to text, and",
    ),
    "no such folder": (
        ["watch", "./nowhere", "--text", "a"],
        r"\./nowhere: is not a folder, expected the folder of a model",
    ),
    "a file": (["watch", "given.txt", "--text", "a"], "given.txt: is not a folder, expected the folder of a model"),
    "an empty folder": (["watch", "empty", "--text", "a"], "empty: has no config.json"),
    "a name that is not there": (
        ["watch", "no/such", "--text", "a"],
        r"no/such: is neither a folder nor reachable on the Hub: HF_HUB_OFFLINE is set, .*download no/such\)",
    ),
    "page and no page": (
        ["watch", "text", "--page", "a.html", "--no-page"],
        "--no-page: got --page too, expected one of the two",
    ),
    "page over a file": (
        ["watch", "text", "--page", "given.txt"],
        "--page: given.txt: exists and is not a page that headscope wrote",
    ),
    "page in no folder": (["watch", "text", "--page", "no/a.html"], "--page: no/a.html: cannot be written"),
    "recording over a file": (
        ["watch", "text", "--out", "given.txt"],
        "--out: given.txt: exists and is not a recording; .* overwrite it with --force$",
    ),
    "recording in no folder": (["watch", "text", "--out", "no/a"], "--out: no/a: no such folder"),
    "recording over a folder": (["watch", "text", "--out", "empty"], "--out: empty: is not a regular file"),
    "zero byte": (["watch", "text", "--out", "a\0b"], r"--out: a\\x00b: "),
    "one file for both": (
        ["watch", "text", "--out", "a", "--page", "./a"],
        r"--page: \./a: expected another file than that of --out",
    ),
    "recording without a name": (["watch", "text", "--out", ""], "--out: is empty, expected the name of a file"),
    "recording named -": (["watch", "text", "--out", "-"], "--out: got -, expected the name of a file"),
    "page without a name": (["watch", "text", "--page", ""], "--page: is empty, expected the name of a file"),
    "older one without a name": (["watch", "text", "--against", ""], "--against: expected a path, got an empty one"),
    "no older one": (["watch", "text", "--against", "no.safetensors"], "--against: no.safetensors: no such file"),
    "older one of 300": (["watch", "text", "--against", "a" * 300], "--against: a{300}: cannot be read: File name too"),
    "older one is none": (
        ["watch", "text", "--against", "given.txt"],
        "--against: given.txt: is not a file of headscope",
    ),
    "a name of 300": (["watch", "a" * 300, "--ids", "5"], "a{300}: is neither a folder nor reachable on the Hub: "),
    "a path of 300": (
        ["watch", "./" + "a" * 300, "--ids", "5"],
        r"\./a{300}: is not a folder, expected the folder of a model",
    ),
    "text with 300": (["text", "a", "--model", "a" * 300], "a{300}: is neither a folder nor reachable on the Hub: "),
    "a recording of 300": (["watch", "text", "--out", "a" * 300], "--out: a{300}: cannot be written: File name too"),
    "no name of a model": (
        ["watch", "", "--ids", "5"],
        'MODEL: expected "text", "digits", a folder or a name on the hub, got an empty name',
    ),
    "no name of a file": (["watch", "text", "--file", ""], "--file: expected a path, got an empty one"),
    "no name of a picture": (
        ["watch", "digits", "--image", ""],
        "image: expected the path of a picture, got an empty path",
    ),
    "no name of a digit": (["image", ""], "image: expected the path of a picture, got an empty path"),
    "threshold alone": (["watch", "text", "--threshold", "map=1"], "--threshold: requires --against"),
    "no such layer": (
        ["watch", "text", "--text", "a", "--layers", "x"],
        "model: --layers: 'x' does not match any module",
    ),
    "text with digits": (["text", "a", "--model", "digits"], "--model: the shipped vision model reads images"),
    "text drawn": (["text", "a", "--model", "x", "--seed-random"], "--seed-random: expected the shipped model"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(mistake: str, run: Run, offline: None) -> None:
    Path("given.txt").write_text("given", encoding="utf-8")
    Path("empty").mkdir()
    arguments, message = MISTAKES[mistake]
    ran = run(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert re.fullmatch(rf"headscope \w+: .*{message}.*\n", ran.err), ran.err
    assert Path("given.txt").read_text(encoding="utf-8") == "given"
    assert not Path("headscope-report.html").exists()


OVER: dict[str, tuple[list[str], str]] = {
    "text": (["text", "--file", "a", "--out", "./a"], "--out: ./a: is the text itself"),
    "text, through a link": (["text", "--file", "link", "--out", "a"], "--out: a: is the text itself"),
    "text, the default": (["text", "--file", "headscope-text.html"], "--out: headscope-text.html: is the text"),
    "image": (["image", "a", "--out", "link"], "--out: link: is the picture itself"),
    "watched text": (["watch", "text", "--file", "a", "--out", "a"], "--out: a: is the text itself"),
    "watched text, page": (["watch", "text", "--file", "a", "--page", "a"], "--page: a: is the text itself"),
    "watched image": (["watch", "digits", "--image", "a", "--page", "a"], "--page: a: is the image itself"),
    "older recording": (
        ["watch", "text", "--text", "b", "--against", "old.safetensors", "--page", "old.safetensors"],
        "--page: old.safetensors: is the older recording itself",
    ),
    "model": (["watch", "model", "--ids", "1", "--out", "model/w.safetensors"], "is a file of the model itself"),
    "model, page": (["text", "b", "--model", "model", "--out", "model/config.json"], "is a file of the model itself"),
}


@pytest.mark.parametrize("case", OVER)
def test_what_is_read_is_not_written_over(case: str, run: Run, offline: None) -> None:
    Path("model").mkdir()
    for name in ("a", "headscope-text.html", "model/w.safetensors", "model/config.json"):
        Path(name).write_text(f"{MARKER if name[0] == 'h' else ''}given", encoding="utf-8")
    Path("link").symlink_to("a")
    q = torch.randn(1, 2, 3, 4)
    observe(q, q).named("a").save("old.safetensors")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    arguments, message = OVER[case]
    ran = run(*arguments, *(() if "default" in case else ("--force",)))
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("shares=1", "got shares=1, expected one of share, entropy"),
        ("share", "got share, expected a number after share="),
        ("ratio=1", "ratio: got 1.0, expected above 1"),
    ],
)
def test_thresholds_are_checked(limit: str, message: str, run: Run) -> None:
    ran = run("watch", "text", "--text", "a", "--against", "x", "--threshold", limit)
    assert (ran.code, ran.err) == (2, ran.err)
    assert message in ran.err


def test_a_threshold_is_given_once(run: Run) -> None:
    twice = ["--threshold", "share=.1", "--threshold", "ratio=2", "--threshold", "share=.2"]
    ran = run("watch", "text", "--text", "a", "--against", "x", *twice)
    assert ran.code == 2
    assert ran.err.endswith("--threshold: expected share once, got it twice; give one of the two\n")


def refused(name: Path | str) -> str:
    with pytest.raises(Mistake) as error:
        load(str(name))
    return error.value.format_message()


def test_nothing_is_unpickled(folder: Path, tmp_path: Path) -> None:
    """A pickle that would write a file, beside a config that transformers would follow."""

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    at = tmp_path / "pickled"
    at.mkdir()
    (at / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save({"x": Trap()}, at / "pytorch_model.bin")
    assert re.search(r"has no weights in \.safetensors; pytorch_model\.bin is a pickle", refused(at))
    (at / "adapter.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert "cannot be loaded" in refused(at), "another name than that of the weights"
    assert not (tmp_path / "ran").exists()


def test_no_code_of_a_repository_runs(folder: Path, tmp_path: Path) -> None:
    at = tmp_path / "coded"
    at.mkdir()
    (at / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (at / "zork.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    (at / "config.json").write_text('{"model_type": "zork", "auto_map": {"AutoConfig": "zork.Zork"}}', encoding="utf-8")
    assert "requires Python code of its repository, which headscope does not run" in refused(at)
    (at / "config.json").write_text('{"model_type": "gpt2", "architectures": ["Trainer"]}', encoding="utf-8")
    assert "cannot be loaded" in refused(at), "the weights do not fit, and what is named is no model"
    (at / "config.json").write_text("{", encoding="utf-8")
    assert "cannot be loaded" in refused(at)
    assert not (tmp_path / "ran").exists()


def test_missing_weights_are_said(folder: Path, tmp_path: Path, run: Run) -> None:
    from safetensors.torch import load_file, save_file

    at = tmp_path / "holes"
    at.mkdir()
    (at / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = {name: x for name, x in load_file(folder / "model.safetensors").items() if "h.1.attn" not in name}
    save_file(weights, at / "model.safetensors", {"format": "pt"})
    ran = run("watch", str(at), "--ids", "3 4 5", "--json")
    assert ran.code == 0
    assert "missing from the files are random: transformer.h.1.attn" in ran.err
    assert "no tokenizer" in run("watch", str(at), "--text", "a").err


def test_weights_that_are_left_over_are_said(folder: Path, tmp_path: Path, run: Run) -> None:
    at = shutil.copytree(folder, tmp_path / "more")
    config = json.loads((at / "config.json").read_text(encoding="utf-8"))
    (at / "config.json").write_text(json.dumps({**config, "n_layer": 1}), encoding="utf-8")
    ran = run("watch", str(at), "--ids", "3 4 5", "--json")
    left = "weights in the files that this model does not have are ignored: transformer.h.1.attn.c_attn.weight, "
    assert left in ran.err
    assert ran.err.endswith(" and 8 more\n")
    assert list(answer(ran)["layers"]) == ["transformer.h.0.attn"]


def test_without_transformers(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs transformers: pip install transformers" in refused(folder)
    assert load("text").context == 256


def test_a_model_that_fails_is_one_line(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", fail)
    ran = run("watch", str(folder), "--ids", "3 4")
    assert (ran.code, "the forward pass failed: out of luck and more" in ran.err) == (2, True)


def test_a_layer_that_cannot_be_seen_is_told_with_the_option_for_it(run: Run, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3}
    config = transformers.LongformerConfig(
        **SIZES, **sizes, intermediate_size=32, max_position_embeddings=32, attention_window=[4], pad_token_id=1
    )
    at = save(transformers.LongformerModel(config), tmp_path / "longformer", tokenizer=False)
    ran = run("watch", str(at), "--ids", "3 4")
    assert ran.code == 2
    assert re.search(
        r"watch: .*1 of the attention layers that ran could not be observed.*\. Exclude them with --layers\n$",
        ran.err,
    ), ran.err


def test_transformers_has_nothing_to_say_of_a_model_that_cannot_be_watched(tmp_path: Path) -> None:
    config = transformers.MambaConfig(hidden_size=24, state_size=4, num_hidden_layers=1, **SIZES)
    save(transformers.MambaForCausalLM(config), tmp_path / "mamba", tokenizer=False)
    done = headscope("watch", "mamba", "--ids", "3 4", cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r"headscope watch: .* no attention call was observed in .*\n", done.stderr), done.stderr


def test_what_comes_from_outside_is_escaped(run: Run, folder: Path, tmp_path: Path) -> None:
    at = tmp_path / "<b>[red]\x1bmodel"
    at.symlink_to(folder)
    name = "<script>alert(1)</script>\x1b.txt".replace("/", "_")
    Path(name).write_text("abc", encoding="utf-8")
    ran = run("watch", str(at), "--file", name)
    assert ran.code == 0, ran.err
    assert "\x1b" not in ran.out
    assert "[red]" in ran.out.replace("\n", ""), "no markup"
    page = Path("headscope-report.html").read_text(encoding="utf-8")
    scripts = [script.attributes.get("id") for script in Page(page).all("script")]
    assert scripts == ["data", "blocks", "exact", None], "no text became a script"
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page


WHILE_WATCHING = f"""
from importlib import import_module
run = import_module("headscope.cli._shared.watch_run")
def strike(*arguments):
    {STRIKE}
run._record_window = strike
"""

WHILE_WRITING = f"""
put = os.replace
def strike_and_put(*paths):
    {STRIKE}
    put(*paths)
os.replace = strike_and_put
"""


@POSIX
@pytest.mark.parametrize(("setup", "left"), [(WHILE_WATCHING, []), (WHILE_WRITING, ["a.safetensors"])])
def test_ctrl_c_leaves_nothing_half_written(setup: str, left: list[str], tmp_path: Path) -> None:
    done = headscope("watch", "text", "--text", "a b c", "--out", "a.safetensors", cwd=tmp_path, setup=setup)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.endswith("headscope: interrupted\n")
    assert names(tmp_path) == left
    if left:
        assert Recording.load(tmp_path / "a.safetensors").heads == 8


# ---------------------------------------------------------------- text --model


def test_text_with_another_model(run: Run, folder: Path) -> None:
    said = answer(run("text", TEXT, "--model", str(folder), "--json", "--layer", "1", "--head", "2"))
    assert len(said["heads"]) == 6
    assert said["trace"] is None
    assert len(said["next"]) == 5
    assert "the last 29 are used" in said["notes"][0] or "29" in said["notes"][0]
    ids = torch.tensor([[token["id"] for token in said["tokens"]]])
    assert (ids.shape[1], int(ids[0, 0])) == (29, 0)
    eager = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        wanted = eager(ids, output_attentions=True)
    got = torch.tensor(said["chosen"]["weights"])
    torch.testing.assert_close(got, wanted.attentions[1][0, 2], rtol=0, atol=2e-6)
    best = wanted.logits[0, -1].softmax(-1).max()
    assert said["next"][0]["probability"] == pytest.approx(float(best), rel=1e-4)


def test_text_with_an_encoder(run: Run, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.BertConfig(num_hidden_layers=1, **sizes, **SIZES)
    at = save(transformers.BertModel(config), tmp_path / "bert")
    ran = run("text", "abc, abc", "--model", str(at), "--no-page")
    assert ran.code == 0, ran.err
    assert "Here each token looks at all tokens." in ran.out
    assert "Likely next tokens" not in ran.out
    assert "step by step" not in ran.out


def test_text_with_a_sliding_window(run: Run, start: Start, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "sliding_window": 4}
    config = transformers.MistralConfig(num_hidden_layers=2, num_key_value_heads=2, **sizes, **SIZES)
    at = save(transformers.MistralForCausalLM(config), tmp_path / "mistral")
    said = answer(run("text", TEXT, "--model", str(at), "--json"))
    watched = [head for layer in start(at, "--text", TEXT)["layers"].values() for head in layer["heads"]]
    for got, wanted in zip(said["heads"], watched, strict=True):
        for name in ("entropy", "normalized_entropy", "distance"):
            assert got["statistics"][name] == pytest.approx(wanted[name]["mean"], rel=1e-4)
    ran = run("text", TEXT, "--model", str(at), "--no-page")
    assert "itself and some of those before it" in " ".join(ran.out.split())


def test_what_a_broken_model_did_is_in_no_statistic(run: Run, folder: Path, tmp_path: Path) -> None:
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    with torch.no_grad():
        model.transformer.wpe.weight[5] = torch.nan
    shutil.copytree(folder, tmp_path / "broken")
    model.save_pretrained(tmp_path / "broken")
    ran = run("text", "abc, abc", "--model", str(tmp_path / "broken"), "--json")
    rows = [head["rows"]["entropy"] for head in answer(ran)["heads"]]
    assert rows == [5] * 3 + [0] * 3
    assert "39 rows of 6 heads contain NaN or infinity and are in no statistic: layer 0 head 0, " in ran.err
    untold = "the next token is not predicted, because the output of the model holds NaN or infinity"
    assert (answer(ran)["next"], untold in answer(ran)["notes"], untold in ran.err) == ([], True, True)
    ran = run("text", "abc, abc", "--model", str(tmp_path / "broken"), "--no-page", "--layer", "1", "--head", "0")
    assert "The weights of this head are not finite." in ran.out
    assert "Likely next tokens" not in ran.out
    assert untold in ran.err


def test_what_text_cannot_show_is_said(run: Run, folder: Path, tmp_path: Path) -> None:
    at = save(gpt2(), tmp_path / "bare", tokenizer=False)
    ran = run("text", "a", "--model", str(at))
    assert (ran.code, "has no tokenizer that can be read (" in ran.err) == (2, True)
    ran = run("text", "a", "--model", str(folder), "--layer", "2")
    assert (ran.code, "--layer: got 2, expected 0 to 1" in ran.err) == (2, True)
