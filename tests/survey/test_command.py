"""``headscope survey``, its page, and the page of two surveys."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.cli import main
from headscope.report.page import digest
from headscope.survey import load_result, render_comparison, render_page, survey, survey_digest
from support.commands import Run, answer
from support.surveys import write_corpus

SMALL = ("--shard-tokens", "300", "--context", "32")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, the survey of it by the command, "one", and that of its Python files, "other"."""
    place = tmp_path_factory.mktemp("command")
    write_corpus(place / "corpus")
    data = ("--data", str(place / "corpus"))
    assert main(("survey", "text", *data, "--out", str(place / "one"), *SMALL)) == 0
    assert main(("survey", "text", *data, "--out", str(place / "other"), *SMALL, "--include", "*.py")) == 0
    return place


def arguments(folders: Path, out: str = "one") -> tuple[str, ...]:
    return ("survey", "text", "--data", str(folders / "corpus"), "--out", str(folders / out), *SMALL)


# ---------------------------------------------------------------- the command


def test_it_prints_the_corpus_the_patterns_and_the_digests(folders: Path, run: Run) -> None:
    ran = run(*arguments(folders))
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert re.fullmatch(r"\d+ documents, 7 left out, [\d,]+ tokens, \d+ shards", lines[0])
    assert lines[1].startswith("Patterns of 48 heads: ")
    digests = survey_digest(folders / "one")
    assert lines[2:] == [
        *(f"sha256 {value}  {name}" for name, value in digests.items()),
        f"Open in a browser: {folders / 'one' / 'survey.html'}",
    ]
    assert re.search(r"^survey: (\d+) of \1 shards, 0 tokens by this process", ran.err, re.MULTILINE)


def test_a_first_run_states_the_overhead_and_json_has_the_progress_in_lines(folders: Path, run: Run) -> None:
    (folders / "few").mkdir()
    (folders / "few" / "a.txt").write_text("import torch, numpy\n" * 300)
    ran = run("survey", "text", "--data", str(folders / "few"), "--out", "out", *SMALL, "--json")
    printed = answer(ran)
    count = printed["shards"]
    assert printed["documents"] == count > 2
    assert printed["overhead"] > 0
    assert printed["sha256"] == survey_digest("out")
    assert {"patterns", "page", "recording", "tokens", "threads"} <= printed.keys()
    events = [json.loads(line) for line in ran.err.splitlines()]
    assert [event["event"] for event in events] == ["start", *["shard"] * count, "end"]
    assert [event["done"] for event in events] == [*range(count + 1), count]
    assert events[-1].keys() == {"event", "done", "shards", "tokens", "seconds", "tokens_per_second"}


def test_the_result_is_that_of_the_function(folders: Path, tmp_path: Path) -> None:
    survey("text", folders / "corpus", tmp_path / "out", shard_tokens=300, context=32)
    assert survey_digest(tmp_path / "out") == survey_digest(folders / "one")


def test_other_ranks_of_torchrun_print_nothing(folders: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    ran = run(*arguments(folders))
    assert (ran.code, ran.out, ran.err) == (0, "", "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--context", "31"), "--out: .*one: holds a survey with another context; expected 32, got 31; use the same"),
        (("--include", "*.md"), r"--data: .*corpus: has no files that match \*.md"),
        (("--data", "none"), "--data: none: no such file or folder"),
        (("--context", "999"), "--context: got 999, expected at most 256, the context of the model"),
        (("--out", ""), "--out: is empty, expected a path"),
        (("--shard-tokens", "0"), "--shard-tokens: got 0"),
    ],
)
def test_a_mistake_is_one_line(changes: tuple[str, ...], message: str, folders: Path, run: Run) -> None:
    ran = run(*arguments(folders), *changes)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert re.match(f"headscope survey: {message}", ran.err), ran.err


def test_a_model_of_images_is_refused(run: Run) -> None:
    ran = run("survey", "digits", "--data", ".", "--out", "out")
    assert (ran.code, ran.out) == (2, "")
    assert "reads images, expected a model of text" in ran.err


# ---------------------------------------------------------------- the pages


def rows(page: str) -> list[list[str]]:
    """The text of each cell of the table, row by row."""
    body = re.sub(r"<svg.*?<title>(.*?)</title>.*?</svg>", r"\1", page.partition("<tbody>")[2], flags=re.DOTALL)
    found = re.findall(r"<tr>(.*?)</tr>", body.partition("</tbody>")[0], re.DOTALL)
    return [
        [html.unescape(re.sub(r"<[^>]*>", " ", cell)).strip() for cell in re.findall("<td.*?</td>", row, re.DOTALL)]
        for row in found
    ]


def test_the_page_has_a_row_for_each_head_with_the_figures_of_the_result(folders: Path) -> None:
    page = (folders / "one" / "survey.html").read_text()
    result = load_result(folders / "one")
    assert page == render_page(result)
    table = rows(page)
    assert len(table) == 48
    layer, head, pattern, _, over_shards, by_document, entropy, by_length, first, distance, documents = table[21]
    assert (layer, head) == ("layers.2.attention", "5")
    summary = result.recording.stats[layer, 5]
    assert entropy == f"{summary['entropy'].mean:.2f} ± {summary['entropy'].std:.2f}"
    assert (first, distance) == (f"{summary['first'].mean:.2f}", f"{summary['distance'].mean:.2f}")
    assert pattern.strip("()").split()[-1] in (
        "local",
        "uniform",
        "previous",
        "next",
        "self",
        "first",
        "duplicate",
        "induction",
    )
    assert re.fullmatch(r"0\.\d\d – [01]\.\d\d", over_shards)
    assert re.fullmatch(r"[01]\.\d+ \([01]\.\d+ – [01]\.\d+\)", by_document)
    assert by_length.startswith("Mean entropy in nats by visible keys, 2: 0.")
    assert re.search(r"[01]\.\d\d +(a\.py|b\.txt|c\.py|lines\.jsonl:\d+)", documents)
    assert "<li><bdi>broken.txt</bdi>: byte 7 (0xff) is not UTF-8</li>" in page


def test_the_page_loads_nothing_and_its_policy_allows_its_own_style_and_script_only(folders: Path) -> None:
    page = (folders / "one" / "survey.html").read_text()
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0]
    (style,), (script,) = (re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("style", "script"))
    assert policy.startswith("default-src 'none'; ")
    assert f"style-src '{digest(style)}'; script-src '{digest(script)}'" in policy
    assert not re.search(r"\bhttps?:|url\(|@import|\sstyle=|\son\w+=", page)


def test_names_from_outside_are_escaped(tmp_path: Path) -> None:
    evil = tmp_path / "corpus" / "<script>alert(1)</script>\u202e\n.txt".replace("/", "")
    evil.parent.mkdir()
    evil.write_text("import torch\n" * 30)
    evil.with_name('"><img src=x>').write_bytes(b"\xff")
    survey("text", evil.parent, tmp_path / "out", context=32)
    page = (tmp_path / "out" / "survey.html").read_text()
    assert page.count("<script>") == 1
    assert "<img" not in page
    assert "\u202e" not in page
    assert "&lt;script&gt;alert(1)&lt;script&gt;\\u202e\\n.txt" in page


def test_report_of_a_folder_writes_its_page(folders: Path, run: Run) -> None:
    ran = run("report", str(folders / "one"))
    assert ran.code == 0
    assert Path("headscope-report.html").read_text() == (folders / "one" / "survey.html").read_text()
    ran = run("report", str(folders / "one"), "--strip", "0.1")
    assert (ran.code, ran.err) == (2, "headscope report: --strip: does not apply to a survey\n")
    ran = run("report", ".")
    assert ran.code == 2
    assert "is not the folder of a survey" in ran.err


def test_report_of_two_folders_compares_them(folders: Path, run: Run) -> None:
    ran = run("report", str(folders / "one"), str(folders / "other"), "--out", "two.html")
    assert ran.code == 0
    page = Path("two.html").read_text()
    one, other = (load_result(folders / name) for name in ("one", "other"))
    assert page == render_comparison(one, other, ("one", "other"))
    table = rows(page)
    assert len(table) == 48
    sizes = [float(row[8]) for row in table]
    assert sizes == sorted(sizes, reverse=True)
    layer, head = table[0][0], int(table[0][1])
    assert table[0][6] == f"{one.recording.stats[layer, head, 'entropy'].mean:.2f}"
    assert table[0][7] == f"{other.recording.stats[layer, head, 'entropy'].mean:.2f}"
    moved = len(one.recording.compare(other.recording).moved)
    assert f"{moved} of 48 heads moved." in page


def test_surveys_of_different_architectures_are_not_compared(folders: Path, tmp_path: Path, run: Run) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), layer).eval()
    survey(model, [[1, 2, 3] * 9], tmp_path / "out", context=16)
    ran = run("report", str(folders / "one"), str(tmp_path / "out"))
    assert ran.code == 2
    assert "different architecture" in ran.err


# ---------------------------------------------------------------- models of transformers


def test_a_model_of_transformers_is_surveyed_with_its_tokenizer_and_the_tokens_of_its_ends(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: n for n, word in enumerate(["<s>", "the", "cat", "sat", "on", "mat", "[UNK]"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="[UNK]")
    sizes: dict[str, Any] = {"vocab_size": 7, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 8}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=0))
    documents = [{"text": "the cat sat on the mat " * 5}, {"text": "the mat sat"}]
    recording = survey(model, documents, tmp_path / "out", tokenizer=tokenizer)
    assert recording.layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert recording.about.options["input"]["tokens"] == 33
    assert recording.about.options["input"]["windows"] == 6, "seven tokens beside that of the start"
    assert recording[0].rows.tolist() == [33 + 6] * 4  # pyright: ignore[reportAttributeAccessIssue]
