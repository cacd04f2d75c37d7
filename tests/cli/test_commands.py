"""The command line in-process: what each command prints and writes, and how it answers a mistake."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from headscope import __version__, load_example, masks
from headscope._attend.backends import native
from headscope.cli import main
from headscope.cli._commands.text import _example
from headscope.cli._shared import check_child
from headscope.cli._shared.console import console
from headscope.cli._shared.observation import Choice
from headscope.report import regions, text_sheet
from headscope.stats import pattern_scores
from support.commands import Ran, Run, answer
from support.html_pages import Page, stored_matrix

COMMANDS = ("text", "image", "trace", "watch", "survey", "doctor")
REPEATED = "def parse(line): return line. def parse(line): return line. def parse(line):"


# ---------------------------------------------------------------- help, version, mistakes


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_every_command(run: Run, arguments: tuple[str, ...]) -> None:
    ran = run(*arguments)
    assert ran.code == 0
    assert ran.err == ""
    assert all(re.search(rf"^  {command} ", ran.out, re.MULTILINE) for command in COMMANDS), ran.out


def test_what_help_says_of_a_command_is_not_cut(run: Run) -> None:
    commands = run("--help").out.partition("Commands:\n")[2].splitlines()
    assert len(commands) == 9
    assert all(line.endswith(".") and not line.endswith("...") for line in commands), commands


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run: Run, command: str) -> None:
    ran = run(command, "--help")
    assert ran.code == 0
    assert "Usage: headscope " + command in ran.out
    assert "--json" in ran.out


def test_it_runs_in_another_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(main, ["--version"]).result() == 0


def test_the_callers_streams_and_signals_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors=errors) for errors in ("strict", "replace")]
    for name, stream in zip(("stdout", "stderr"), streams, strict=True):
        monkeypatch.setattr(sys, name, stream)
    handler = signal.getsignal(signal.SIGINT)
    assert main(["trace", "--seq", "3", "--dim", "4", "--heads", "2"]) == 0
    assert [sys.stdout, sys.stderr] == streams
    assert [stream.errors for stream in streams] == ["strict", "replace"]
    assert signal.getsignal(signal.SIGINT) is handler
    assert "sqrt" in cast(io.BytesIO, streams[0].buffer).getvalue().decode("ascii")


def test_version(run: Run) -> None:
    assert run("--version") == Ran(0, f"headscope {__version__}\n", "")


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no such command": (["nothing"], "nothing: unknown command; expected one of bench, check, doctor"),
    "a misspelt command": (["txt"], r"txt: unknown command; did you mean text\?"),
    "no such option": (["text", "a", "--bend"], "No such option:? '?--bend"),
    "no text": (["text"], "expected one text"),
    "two texts": (["text", "a", "--file", "given.txt"], "expected one text"),
    "empty text": (["text", ""], "text: is empty"),
    "empty file": (["text", "--file", "empty.txt"], "empty.txt: is empty"),
    "missing file": (["text", "--file", "missing.txt"], "missing.txt: cannot be read: No such file"),
    "a directory": (["text", "--file", "."], r"\.: cannot be read: Is a directory"),
    "zero byte in a path": (["text", "--file", "a\0b"], r"a\\x00b: cannot be read"),
    "bytes that are not UTF-8": (["text", "--file", "latin.txt"], r"latin.txt: byte 3 \(0xe9\) is not UTF-8"),
    "a character cut off": (["text", "--file", "cut.txt"], r"cut.txt: byte 3 \(0xc3\) is not UTF-8: unexpected end"),
    "an argument that is not UTF-8": (["text", "caf\udce9"], r"text: byte 3 \(0xe9\) is not UTF-8"),
    "layer": (["text", "a", "--layer", "6"], "--layer: got 6, expected 0 to 5"),
    "head": (["text", "a", "--head", "8"], "--head: got 8, expected 0 to 7"),
    "negative layer": (["text", "a", "--layer", "-1"], "--layer: got -1, expected 0 to 5"),
    "negative head": (["text", "a", "--head", "-1"], "--head: got -1, expected 0 to 7"),
    "a head that is no number": (["text", "a", "--head", "x"], "--head: got x, expected a whole number from 0$"),
    "negative sample": (["image", "--sample", "-1"], "--sample: got -1, expected 0 to 19"),
    "page and no page": (["text", "a", "--out", "b.html", "--no-page"], "--no-page: got --out too, expected one"),
    "page over a file": (["text", "a", "--out", "given.txt"], "exists and is not a page .* with --force$"),
    "page over a directory": (["text", "a", "--out", "."], r"--out: \.: is a directory"),
    "page in no folder": (["text", "a", "--out", "no/such.html"], "--out: no/such.html: cannot be written"),
    "page named -": (["text", "a", "--out", "-"], "--out: got -, expected the name of a file"),
    "page without a name": (["text", "a", "--out", ""], "--out: is empty, expected the name of a file$"),
    "trace without a name": (["trace", "--html", ""], "--html: is empty, expected the name of a file$"),
    "no picture": (["image", "given.txt"], "given.txt: not a readable picture, expected a PNG or a JPEG$"),
    "missing picture": (["image", "missing.png"], "missing.png: cannot be read: No such file"),
    "a directory as picture": (["image", "."], r"\.: cannot be read: Is a directory"),
    "picture cut off": (["image", "cut.png"], "cut.png: cannot be read"),
    "picture too large": (["image", "huge.png"], "huge.png: 8000 x 8000 pixels, expected at most 50,000,000 in all$"),
    "picture and sample": (["image", "given.png", "--sample", "1"], "expected one digit"),
    "sample": (["image", "--sample", "20"], "--sample: got 20, expected 0 to 19"),
    "layer of images": (["image", "--layer", "4"], "--layer: got 4, expected 0 to 3"),
    "sequence of nothing": (["trace", "--seq", "0"], "--seq: got 0, expected a whole number from 1"),
    "not a number": (["trace", "--seq", "ten"], "--seq: got ten, expected a whole number"),
    "heads and width": (["trace", "--heads", "7"], "--heads: embed_dim 512 is not divisible by num_heads 7"),
    "grouped heads": (["trace", "--kv-heads", "3"], "--kv-heads: got 3, expected a divisor"),
    "more than torch can count": (["trace", "--seq", "1000000000", "--batch", "1000000000"], "sizes: a tensor would"),
    "layer of sizes": (["trace", "--layer", "1"], "--layer: got 1 without FILE.py:NAME, expected both$"),
    "values of too much": (["trace", "--seq", "1000000", "--values"], "--values: the steps take"),
    "trace over a file": (["trace", "--html", "given.txt"], "--html: given.txt: exists and is not a page"),
    "trace twice": (["trace", "--html", "a.html", "--json"], "--json: got --html too, expected one of the two$"),
    "device": (["doctor", "--device", "tpu"], "--device: got 'tpu', expected cpu, cuda, mps or xpu"),
    "softcap": (["doctor", "--softcap", "0"], "--softcap: got 0.0, expected a finite number above 0$"),
    "dropout": (["doctor", "--dropout", "1"], "--dropout: got 1.0, expected a probability"),
    "key/value heads": (["doctor", "--kv-heads", "3"], "--kv-heads: got 3, expected a divisor of --heads 8"),
    "sizes of doctor": (["doctor", "--seq", "1000000000", "--batch", "1000000000"], r"expected fewer than 2\*\*63"),
    "mask of doctor": (["doctor", "--seq", "1000000000", "--causal"], r"expected at most 16777216 with a mask"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_code_2(run: Run, case: str) -> None:
    arguments, message = MISTAKES[case]
    Path("given.txt").write_text("not ours")
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes(b"caf\xe9!")
    Path("cut.txt").write_bytes(b"caf\xc3")
    Image.effect_noise((64, 64), 50).save("given.png")
    Path("cut.png").write_bytes(Path("given.png").read_bytes()[:1000])
    if case == "picture too large":
        Image.new("1", (8000, 8000)).save("huge.png")
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    ran = run(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert re.fullmatch(r"headscope[^\n]*\n", ran.err), ran.err
    assert re.search(message, ran.err), ran.err
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before, "a mistake leaves every file alone"


def test_a_mistake_shows_no_escape_sequence(run: Run) -> None:
    ran = run("text", "--file", "\x1b[31mred\n\x9b2Jtwo")
    assert ran.code == 2
    assert ran.err == "headscope text: \\x1b[31mred \\x9b2Jtwo: cannot be read: No such file or directory\n"


# ---------------------------------------------------------------- text


def test_text_shows_tokens_steps_heads_a_map_and_writes_a_page(run: Run) -> None:
    ran = run("text", "i love to code")
    assert ran.code == 0
    assert ran.err == ""
    assert re.search(r"^0 i  1 ", ran.out, re.MULTILINE), "tokens with their numbers"
    for step in ("queries", "split keys", "scores", "mask", "weights", "head outputs", "concatenation", "output"):
        assert re.search(rf"^{step} .*✓\s*$", ran.out, re.MULTILINE), f"{step} with an invariant that held"
    assert len(re.findall(r"^layer \d ", ran.out, re.MULTILINE)) == 6
    assert re.search(r"^Layer \d, head \d  the most striking head: ", ran.out, re.MULTILINE)
    assert "Attention shows where a head reads, not why the model answered.\n" in ran.out
    assert ran.out.endswith("Open in a browser: headscope-text.html (all 48 heads)\n")
    assert [path.name for path in Path().iterdir()] == ["headscope-text.html"]
    assert Path("headscope-text.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert "\x1b" not in ran.out, "no colours where there is no terminal"
    assert max(len(line) for line in ran.out.splitlines()) <= 80


@pytest.mark.parametrize(
    "arguments",
    [("text", "hi", "--no-page"), ("image", "--no-page"), ("trace",), ("doctor",), ("watch", "digits", "--no-page")],
)
def test_no_columns_stand_for_unset(arguments: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = run(*arguments)
    monkeypatch.setenv("COLUMNS", "0")
    assert run(*arguments).out == usual.out != ""


def test_a_console_has_a_least_width(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, width in ((1, 20), (19, 20), (20, 20), (50, 50), (500, 120)):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert console().width == width


def test_text_fits_the_width_that_is_given(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (50, 97):
        monkeypatch.setenv("COLUMNS", str(columns))
        ran = run("text", REPEATED, "--no-page")
        assert ran.code == 0
        assert max(len(line) for line in ran.out.splitlines()) <= columns


def test_text_explains_in_full_when_asked(run: Run) -> None:
    ran = run("text", "i love to code", "--no-page", "--explain")
    assert "torch.softmax(s, dim=-1)" in ran.out, "the code of a step"
    assert "Softmax over the wrong axis" in ran.out, "its common mistake"
    assert re.search(r"^5\.7 ", ran.out, re.MULTILINE), "a line for each head"


def test_the_example_row_is_of_weights_that_there_are() -> None:
    pieces = [f"w{n}" for n in range(6)]
    weights = torch.stack([torch.eye(6), torch.eye(6)[[0, 0, 1, 2, 3, 4]], torch.full((6, 6), torch.nan)])
    weights[1, 3] = torch.nan
    sheet = text_sheet("x", pieces, [weights])
    said = [_example(sheet, Choice(0, head, "")).plain for head in range(3)]
    assert said[0] == "Each token looks only at itself."
    assert said[1].endswith("For example, w1 (1) gives 100% of its attention to w0 (0).")
    assert said[2] == "The weights of this head are not finite."
    alone = _example(text_sheet("x", ["a"], [torch.ones(1, 1, 1)]), Choice(0, 0, "")).plain
    assert alone == "A single token can look only at itself."


def test_text_as_json(run: Run) -> None:
    found = answer(run("text", "i love to code", "--json"))
    tokens, chosen = found["tokens"], found["chosen"]
    assert "".join(token["text"] for token in tokens) == "i love to code"
    assert [token["position"] for token in tokens] == list(range(len(tokens)))
    assert [(head["layer"], head["head"]) for head in found["heads"]] == [(i, j) for i in range(6) for j in range(8)]
    assert {"entropy", "effective_keys", "distance", "previous"} <= found["heads"][0]["statistics"].keys()
    weights = torch.tensor(chosen["weights"], dtype=torch.float64)
    assert_close(weights.sum(-1), torch.ones(len(tokens), dtype=torch.float64), atol=1e-5, rtol=0)
    assert_close(weights.triu(1), torch.zeros_like(weights), msg="no weight on the future")
    step = next(row for row in found["trace"]["rows"] if row["step"] == "scores")
    assert step["shape"] == [1, 8, len(tokens), len(tokens)]
    probabilities = [guess["probability"] for guess in found["next"]]
    assert probabilities == sorted(probabilities, reverse=True)
    assert found["page"] is None
    assert list(Path().iterdir()) == [], "no page unless it is asked for"


def test_json_numbers_are_those_of_the_model(run: Run) -> None:
    found = answer(run("text", REPEATED, "--json", "--layer", "3", "--head", "5"))
    example = load_example("text")
    ids = torch.tensor([[token["id"] for token in found["tokens"]]])
    with torch.inference_mode():
        logits, weights = example.model(ids, need_weights=True)
    assert ids[0].tolist() == example.tokenizer.encode(REPEATED)
    assert (found["chosen"]["layer"], found["chosen"]["head"]) == (3, 5)
    assert_close(torch.tensor(found["chosen"]["weights"]), weights[3][0, 5], atol=1e-6, rtol=0)
    best = logits[0, -1].softmax(-1).max()
    assert_close(torch.tensor(found["next"][0]["probability"]), best, atol=1e-5, rtol=0)


def test_the_most_striking_head_has_the_highest_score_of_a_sharp_pattern(run: Run) -> None:
    example = load_example("text")
    ids = example.tokenizer.encode(REPEATED)
    with torch.inference_mode():
        _, weights = example.model(torch.tensor([ids]), need_weights=True)
    seen = masks.causal().dense(1, 8, len(ids), len(ids))
    scores = [pattern_scores(layer, seen=seen, tokens=torch.tensor(ids)).score for layer in weights]
    sharp = ("previous", "self", "duplicate", "induction")
    table = torch.stack([torch.stack([s[name].nan_to_num(-1) for name in sharp]).amax(0) for s in scores])  # [L, H]
    for options, part in ((("--layer", "4"), table[4:5]), (("--head", "2"), table[:, 2:3])):
        chosen = answer(run("text", REPEATED, "--json", *options))["chosen"]
        assert_close(table[chosen["layer"], chosen["head"]], part.max(), rtol=0, atol=1e-9, msg=f"{options}: {chosen}")


@pytest.mark.parametrize("arguments", [("text", REPEATED), ("image", "--sample", "3")])
def test_the_most_striking_head_is_that_of_the_first_highlight(arguments: tuple[str, ...], run: Run) -> None:
    found = answer(run(*arguments, "--json"))
    first = found["highlights"][0]
    assert (first["layer"], first["head"]) == (found["chosen"]["layer"], found["chosen"]["head"])
    lines = run(*arguments, "--no-page").out.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("What to look at first"))
    printed = " ".join(line.strip() for line in lines[at + 1 : lines.index("", at)])
    assert printed == " ".join(f"• {each['sentence']}." for each in found["highlights"])
    assert at < next(n for n, line in enumerate(lines) if line.startswith(("Tokens", "The digit")))


def test_a_single_token_has_no_pattern(run: Run) -> None:
    ran = run("text", "i", "--no-page")
    assert ran.code == 0
    assert "too few tokens to match a pattern" in ran.out
    assert answer(run("text", "i", "--json"))["heads"][0]["pattern"] is None


def test_untrained_is_said_and_repeats(run: Run) -> None:
    trained, once, again = (answer(run("text", REPEATED, "--json", "--layer", "1", "--head", "1", *extra))
                            for extra in ((), ("--seed-random",), ("--seed-random",)))  # fmt: skip
    assert "untrained" in once["model"]
    assert "untrained" not in trained["model"]
    assert once == again
    assert once["chosen"]["weights"] != trained["chosen"]["weights"]


def test_a_text_beyond_the_context_is_cut_at_its_beginning(run: Run) -> None:
    text = " ".join(f"x{number} = {number * 7919}" for number in range(500))
    Path("long.txt").write_text(text)
    ran = run("text", "--file", "long.txt", "--json")
    ids = load_example("text").tokenizer.encode(text)
    note = f"the text has {len(ids):,} tokens, the model reads 256 at once; only the last 256 are used"
    assert ran.err == f"headscope text: {note}\n"
    found = answer(ran)
    assert found["notes"] == [note]
    assert [token["id"] for token in found["tokens"]] == ids[-256:]


def test_a_text_of_megabytes_is_read_from_its_end(run: Run) -> None:
    Path("long.txt").write_text("é, " * 700_000 + "the end")
    ran = run("text", "--file", "long.txt", "--json")
    assert ran.err == (
        "headscope text: the text has 2,100,007 characters, more than the model reads at once; "
        "only its last 256 tokens are used\n"
    )
    assert "".join(token["text"] for token in answer(ran)["tokens"][-5:]).endswith("the end")


def test_a_byte_order_mark_is_no_part_of_the_text(run: Run) -> None:
    Path("marked.txt").write_bytes(b"\xef\xbb\xbfhello")
    found = answer(run("text", "--file", "marked.txt", "--json"))
    assert "".join(token["text"] for token in found["tokens"]) == "hello"


def test_nothing_in_the_text_reaches_the_terminal_raw(run: Run) -> None:
    hostile = "\x1b[31mred\x1b]0;title\x07 \x9b2J \u202egnp.exe \u2066x \u200b [bold]no[/bold] :smile: \x00\r\n\t"
    Path("given.txt").write_text(hostile, encoding="utf-8")
    for options in ((), ("--explain",)):
        ran = run("text", "--file", "given.txt", *options)
        assert ran.code == 0
        raw = sorted({character for character in ran.out if not character.isprintable()} - {"\n", "\xa0"})
        assert raw == []
    page = Path("headscope-text.html").read_text(encoding="utf-8")
    assert not set(page) & set("\x1b\x9b\x07\x00\u202e\u2066")


def test_the_page_of_a_text_explains_weights(run: Run) -> None:
    example = load_example("text")
    assert run("text", "the cat sat on the mat and the cat", "--layer", "1", "--head", "5").code == 0
    page = Page(Path("headscope-text.html").read_text(encoding="utf-8"))
    places = [(each["layer"], each["head"]) for each in page.data["exact"]]
    assert (len(places), places[0]) == (8, (1, 5)), "the head that the page opens on is one of them"
    ids = example.tokenizer.encode("the cat sat on the mat and the cat")
    with torch.inference_mode():
        _, weights = example.model(torch.tensor([ids]), need_weights=True)
    for about in page.data["exact"]:
        q, k = (stored_matrix(page, about[name], len(ids), about["depth"]) for name in "qk")
        lse = torch.frombuffer(bytearray(page.exact(about["lse"])), dtype=torch.float32).double()
        p = (about["scale"] * q @ k.T - lse[:, None]).exp().tril()
        assert_close(p, weights[about["layer"]][0, about["head"]].double(), rtol=1e-3, atol=1e-5)


def test_a_text_is_no_html(run: Run) -> None:
    assert run("text", "<script>alert(1)</script><b>&amp;").code == 0
    page = Path("headscope-text.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "<b>&amp;" not in page


# ---------------------------------------------------------------- pages


def test_a_page_of_ours_is_replaced_and_another_file_only_by_force(run: Run) -> None:
    assert run("text", "one", "--out", "page.html").code == 0
    first = Path("page.html").read_bytes()
    assert run("image", "--out", "page.html").code == 0
    assert Path("page.html").read_bytes() != first
    assert run("trace", "--html", "page.html") == Ran(0, "page.html\n", "")
    Path("mine.txt").write_text("mine")
    assert run("text", "one", "--out", "mine.txt").code == 2
    assert Path("mine.txt").read_text() == "mine"
    assert run("text", "one", "--out", "mine.txt", "--force").code == 0
    assert Path("mine.txt").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert sorted(path.name for path in Path().iterdir()) == ["mine.txt", "page.html"], "no temporary file is left"


def test_no_page_writes_none(run: Run) -> None:
    ran = run("image", "--no-page")
    assert ran.code == 0
    assert "browser" not in ran.out
    assert list(Path().iterdir()) == []


def test_json_with_a_page(run: Run) -> None:
    assert answer(run("image", "--json", "--out", "page.html"))["page"] == "page.html"
    assert Path("page.html").is_file()


# ---------------------------------------------------------------- image


def test_image_shows_the_class_the_heads_and_their_maps(run: Run) -> None:
    ran = run("image", "--sample", "7")
    assert ran.code == 0
    assert "shipped sample 7, a 7" in ran.out
    assert len(re.findall(r"^[ .:=+*#%@-]+\s+\d +\d+\.\d%|^ +\d +\d+\.\d%", ran.out, re.MULTILINE)) == 10
    assert len(re.findall(r"^layer \d ", ran.out, re.MULTILINE)) == 4
    layer = re.search(r"^All heads of layer (\d)", ran.out, re.MULTILINE)
    assert layer is not None
    assert all(f"{layer[1]}.{head} " in ran.out for head in range(8))
    assert re.search(r"^Layer \d, head \d  the most striking head: [a-z]+ \d\.\d times as much", ran.out, re.MULTILINE)
    assert max(len(line) for line in ran.out.splitlines()) <= 80


def test_image_as_json(run: Run) -> None:
    found = answer(run("image", "--sample", "7", "--json"))
    example = load_example("digits")
    with torch.inference_mode():
        logits, weights = example.model(example.samples[7].image[None], need_weights=True)
    assert found["input"]["label"] == 7
    assert_close(torch.tensor(found["input"]["pixels"]), example.samples[7].image)
    assert_close(torch.tensor(found["probabilities"]), logits[0].softmax(-1), atol=1e-5, rtol=0)
    assert found["predicted"] == int(logits.argmax())
    chosen = found["chosen"]
    assert_close(torch.tensor(chosen["weights"]), weights[chosen["layer"]][0, chosen["head"]], atol=1e-6, rtol=0)
    regions = found["heads"][0]["regions"]
    assert {"centre", "edges", "boundary", "texture", "layout", "near", "far"} <= regions.keys()
    ratios = {
        (head["layer"], head["head"]): max(head["regions"][name] for name in ("centre", "edges", "boundary", "texture"))
        for head in found["heads"]
        if head["pattern"]["pattern"] != "fixed key"  # its ratios are those of one patch
    }
    assert ratios[chosen["layer"], chosen["head"]] == max(ratios.values())


def test_a_region_is_named_only_where_its_ratio_is_clear(run: Run) -> None:
    out = run("image", "--no-page").out
    lines = out[out.index("All heads") :].splitlines()
    named = [line.split()[2:] for line in lines if line.startswith("layer ")]
    ratios = [line.split()[1:] for line in lines if line.startswith(" ratio")]
    assert len(named) == len(ratios) == 4
    both = [pair for row in zip(named, ratios, strict=True) for pair in zip(*row, strict=True)]
    assert {region for region, ratio in both if ratio == "-"} == {"-"}, "most of the weight is on one patch"
    pairs = [(region, float(ratio)) for region, ratio in both if ratio != "-"]
    assert {region == "-" for region, ratio in pairs if ratio < 1.15} == {True}
    assert {region == "-" for region, ratio in pairs if ratio > 1.25} == {False}


def test_what_position_explains_is_of_the_other_samples(run: Run) -> None:
    heads = answer(run("image", "--sample", "7", "--json"))["heads"]
    example = load_example("digits")
    images = torch.stack([sample.image for sample in example.samples])
    with torch.inference_mode():
        _, weights = example.model(images, need_weights=True)
    others = [n for n in range(len(images)) if n != 7]
    picture = (images[7] * 255).round().byte().numpy()
    for layer, p in enumerate(weights):
        wanted = regions.measure(p[7], picture, (8, 8), position_map=p[others].mean(0))["layout_r2"]
        got = torch.tensor([head["regions"]["layout_r2"] for head in heads if head["layer"] == layer])
        assert_close(got, wanted.to(got), atol=1e-4, rtol=1e-3)


def test_image_says_what_was_done_to_a_picture(run: Run) -> None:
    tile = load_example("digits").samples[0].image
    paper = Image.new("L", (300, 200), 250)
    grey = Image.fromarray((255 * (1 - tile)).byte().numpy()).resize((120, 120))
    paper.paste(grey, (100, 40))
    paper.convert("RGB").save("zero.jpg", quality=95)
    found = answer(run("image", "zero.jpg", "--json"))
    assert found["predicted"] == 0
    assert found["input"]["label"] is None
    assert found["input"]["done"][:2] == ["300 x 200 RGB", "dark strokes on a light ground, inverted"]
    assert found["input"]["done"][-1].startswith(("scaled to 8 x 8", "thin strokes"))
    assert "inverted" in run("image", "zero.jpg", "--no-page").out.replace("\n", " ")


def test_an_even_picture_has_nothing_to_look_at(run: Run) -> None:
    Image.new("RGB", (31, 17), (200, 10, 10)).save("even.png")
    ran = run("image", "even.png", "--no-page")
    assert ran.code == 0
    assert "no strokes" in ran.out.replace("\n", " ")


# ---------------------------------------------------------------- trace


def test_trace_has_the_shapes_of_the_seed(run: Run) -> None:
    rows = {row["step"]: row for row in answer(run("trace", "--json"))["rows"]}
    wanted = {
        "input": [32, 10, 512], "queries": [32, 10, 512], "split queries": [32, 8, 10, 64], "scores": [32, 8, 10, 10],
        "weights": [32, 8, 10, 10], "head outputs": [32, 8, 10, 64], "concatenation": [32, 10, 512],
        "output": [32, 10, 512],
    }  # fmt: skip
    assert {step: rows[step]["shape"] for step in wanted} == wanted
    ran = run("trace", "--batch", "32", "--seq", "10", "--dim", "512", "--heads", "8")
    for shape in ("[32, 10, 512]", "[32, 8, 10, 64]", "[32, 8, 10, 10]"):
        assert shape in ran.out


def test_trace_of_a_million_tokens_allocates_nothing(run: Run) -> None:
    rows = {row["step"]: row for row in answer(run("trace", "--seq", "1000000", "--json"))["rows"]}
    assert rows["scores"]["shape"] == [32, 8, 1000000, 1000000]
    assert rows["scores"]["corner"] is None


def test_trace_takes_every_size(run: Run) -> None:
    sizes = ("--batch", "2", "--seq", "3", "--dim", "30", "--heads", "6", "--kv-heads", "2", "--head-dim", "7")
    found = answer(run("trace", *sizes, "--context-seq", "11", "--causal", "--values", "--json"))
    rows = {row["step"]: row for row in found["rows"]}
    assert rows["context"]["shape"] == [2, 11, 30]
    assert rows["split keys"]["shape"] == [2, 2, 11, 7]
    assert rows["weights"]["shape"] == [2, 6, 3, 11]
    assert found["held"] is True
    assert all(row["held"] for row in found["rows"])


def test_trace_with_values_repeats_and_leaves_the_generator_alone(run: Run) -> None:
    state = torch.get_rng_state()
    once, again = (run("trace", "--seq", "5", "--values", "--json").out for _ in range(2))
    assert once == again
    assert torch.equal(torch.get_rng_state(), state)


def test_trace_explains(run: Run) -> None:
    short, full = run("trace", "--causal"), run("trace", "--causal", "--explain")
    assert "Polarity" not in short.out
    assert "Polarity" in full.out, "the common mistake at a mask"


def test_trace_page_is_self_contained(run: Run) -> None:
    assert run("trace", "--html", "trace.html", "--values").out == "trace.html\n"
    page = Path("trace.html").read_text(encoding="utf-8")
    assert "<title>MultiHeadAttention(512, 8) on x [32, 10, 512]</title>" in page
    assert not re.search(r"https?://|<script|\ssrc=|@import|url\(", page), "the page asks for nothing"


@pytest.mark.skipif(os.name != "posix", reason="elsewhere no file has such a name")
def test_the_name_of_a_page_is_shown_as_a_terminal_can(run: Run) -> None:
    assert run("trace", "--html", "\x1b[31m\udcff.html").out == "\\x1b[31m\\udcff.html\n"


# ---------------------------------------------------------------- doctor


def test_doctor_shows_the_machine_and_every_typical_call(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "extension", None)  # as without a C++ compiler
    ran = run("doctor")
    assert ran.code == 0
    for word in (
        "versions",
        "machine",
        "threads",
        "not installed: no C++ compiler was available",
        torch.__version__,
        "plain",
        "causal",
        "decode",
    ):
        assert word in ran.out, word
    assert re.search(r"^  plain +sdpa +sdpa$", ran.out, re.MULTILINE)
    assert re.search(r"^ +sdpa does not run it: softcap", ran.out, re.MULTILINE)
    assert "observe runs in Python (build: the native extension is not installed)\n" in ran.out
    assert ran.out.startswith("No native kernels: no C++ compiler")
    assert ran.out.count("the native extension is not installed") == 1, "not at each call"


def test_doctor_judges_a_call_of_ones_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "extension", None)
    found = answer(run("doctor", "--heads", "6", "--kv-heads", "3", "--seq", "11", "--softcap", "5", "--json"))
    (call,) = found["calls"]
    sizes = call["sizes_and_options"]
    assert (sizes["heads"], sizes["kv_heads"], sizes["queries"], sizes["softcap"]) == (6, 3, 11, 5.0)
    assert call["dtypes"].keys() == {"float32", "bfloat16"}
    verdict = call["dtypes"]["float32"]
    assert verdict["selected"] == "blocked"
    assert verdict["refusals"]["sdpa"] == ["softcap: scaled_dot_product_attention does not support it"]
    assert verdict["observer"] == ["build: the native extension is not installed"]
    ran = run("doctor", "--seq", "11", "--causal")
    assert "Q 11, K 11, D 64, Dv 64, causal" in ran.out
    assert "versions" not in ran.out


@pytest.mark.parametrize("arguments", [("doctor",), ("doctor", "--lse", "--softcap", "5"), ("doctor", "--matrix")])
def test_doctor_fits_the_width_that_is_given(
    arguments: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "43")
    assert max(map(len, run(*arguments).out.splitlines())) <= 43


def test_doctor_goes_through_all_options(run: Run) -> None:
    found = answer(run("doctor", "--matrix", "--dtype", "float32", "--json"))
    assert found["device"] == "cpu"
    (cell,) = (cell for cell in found["matrix"] if (cell["option"], cell["backend"]) == ("sinks", "sdpa"))
    assert cell == {"option": "sinks", "dtype": "float32", "backend": "sdpa", "target": None, "takes": False,
                    "reasons": ["sinks: scaled_dot_product_attention does not support them"]}  # fmt: skip
    ran = run("doctor", "--matrix")
    assert ran.code == 0
    assert "(device: cpu; float32, bfloat16, float16," in ran.out
    assert re.search(r"^ +mask: interleaved documents .*no \(\d+\) +yes +yes", ran.out, re.MULTILINE)
    assert re.search(r"^ +\(1\) ", ran.out, re.MULTILINE)
    assert (
        run("doctor", "--matrix", "--causal").err
        == "headscope doctor: --matrix: judges every option, got --causal too; drop one of the two\n"
    )


HOMEWORK = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1)
        scores = scores / x.shape[-1] ** 0.5
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""


def test_trace_of_a_class_of_a_file_has_its_lines(run: Run, tmp_path: Path) -> None:
    (tmp_path / "homework.py").write_text(HOMEWORK, encoding="utf-8")
    target = str(tmp_path / "homework.py") + ":Attention"
    ran = run("trace", target, "--args", "24, 3", "--seq", "7", "--json")
    found = answer(Ran(ran.code, ran.out, ""))
    rows = {row["step"]: row for row in found["rows"]}
    assert found["held"] is True
    assert rows["weights"]["axes"] == {"B": 2, "H": 3, "Q": 7, "K": 7}
    assert rows["scores"]["code"] == "# homework.py:14\nscores = q @ k.transpose(-2, -1)"
    assert "(check: scale-sqrt-embed-dim)" in rows["scale"]["note"]


@pytest.fixture
def traced_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of a file runs in this process, which has imported torch, and leaves it as it was."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setitem(sys.modules, "homework", sys)
    del sys.modules["homework"]

    def answer_here(request: dict[str, Any], timeout: int) -> dict[str, Any]:
        return json.loads(json.dumps(check_child.answer_request(request)))

    monkeypatch.setattr(import_module("headscope.cli._commands.trace"), "ask_child", answer_here)


@pytest.mark.usefixtures("traced_here")
def test_trace_of_a_class_of_a_file_notes_what_is_unusual(run: Run, tmp_path: Path) -> None:
    (tmp_path / "homework.py").write_text(HOMEWORK, encoding="utf-8")
    shown = run("trace", str(tmp_path / "homework.py") + ":Attention", "--args", "24, 3")
    assert shown.code == 0
    assert "unusual: scale" in shown.out


@pytest.mark.usefixtures("traced_here")
def test_trace_of_a_file_shows_the_layer_that_is_asked_for(run: Run, tmp_path: Path) -> None:
    both = "class Both(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    both += "        self.parts = nn.Sequential(Attention(24, 3), Attention(24, 2))\n\n"
    both += "    def forward(self, x):\n        return self.parts(x)\n"
    (tmp_path / "homework.py").write_text(HOMEWORK + "\n\n" + both, encoding="utf-8")
    ran = run("trace", str(tmp_path / "homework.py") + ":Both", "--layer", "1", "--json")
    found = answer(Ran(ran.code, ran.out, ""))
    assert found["title"] == "Both on x [2, 10, 24], layer 1 of 0–1"
    assert {row["step"]: row for row in found["rows"]}["weights"]["axes"] == {"B": 2, "H": 2, "Q": 10, "K": 10}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--args", "24"], "Attention: cannot be built with --args '24'"),
        (["--args", "24, 3", "--heads", "3"], "--heads: is for a trace of sizes"),
        (["--args", "24, 3", "--dim", "25"], "module: the call Attention(x [2, 10, 25]) failed"),
        (["--args", "24, 3", "--layer", "1"], "--layer: got 1, expected 0 to 0, the attentions of Attention"),
    ],
)
@pytest.mark.usefixtures("traced_here")
def test_trace_of_a_file_names_the_mistake(run: Run, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "homework.py").write_text(HOMEWORK, encoding="utf-8")
    ran = run("trace", str(tmp_path / "homework.py") + ":Attention", *arguments)
    assert ran.code == 2
    assert message in ran.err
