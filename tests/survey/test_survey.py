"""The result of a survey, and what is refused."""

from __future__ import annotations

import errno
import json
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import headscope
from headscope import Observe, Recording, load_example, masks
from headscope.decisions import patterns
from headscope.stats import HeadStats
from headscope.survey import SurveyError, load_result, survey
from headscope.survey._documents import rows_of, values_of
from headscope.survey._folder import Folder
from headscope.survey._merge import canonical
from headscope.survey._work import cut
from support.surveys import write_corpus

CONTEXT = 32
WHAT = Observe(map=4, edges=2, windows=(3,))
SHORT: dict[str, Any] = {"shard_tokens": 150, "context": CONTEXT, "what": WHAT}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("survey") / "corpus")


@pytest.fixture(scope="module")
def out(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a complete survey, which tests must not change."""
    folder = tmp_path_factory.mktemp("complete") / "out"
    survey("text", corpus, folder, **SHORT)
    return folder


class Small(nn.Module):
    """A model of one layer, that reads token ids."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(11, 16)
            self.attention = headscope.MultiHeadAttention(16, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.attention(self.embedding(ids), mask=masks.causal())


IDS = [[1, 2, 3, 4] * 9, [5, 6] * 20, [7, 8, 9] * 12, [1, 2]]


# ---------------------------------------------------------------- the result


def test_the_statistics_are_those_of_a_watch_of_all_windows(tmp_path: Path) -> None:
    model = Small()
    recording = survey(model, IDS, tmp_path / "out", shard_tokens=20, context=16, what=WHAT)
    watched: list[HeadStats] = []
    for ids in IDS:
        for window in cut(ids, 16, ([], [])):
            what = Observe(map=4, edges=2, windows=(3,), tokens=torch.tensor([window]))
            with torch.inference_mode(), headscope.watch(model, what=what) as seen:
                model(torch.tensor([window]))
            watched.append(seen.stats)
    expected = HeadStats.merge(*watched)
    assert recording.names == expected.names
    for name in expected.names:
        one, other = (stats[0, name] for stats in (recording.stats, expected))
        assert_close(one.count, other.count, rtol=0, atol=0)
        assert_close(one.mean, other.mean, equal_nan=True)
        assert_close(one.std, other.std, equal_nan=True)
    for what in ("received", "eligible"):
        assert_close(getattr(recording[0], what), getattr(expected, what))
    assert_close(recording.stats.map.mean, expected.map.mean, equal_nan=True)
    assert_close(recording.stats.edges.p, expected.edges.p)
    entry = recording.about.options["survey"]
    assert (entry["documents"], entry["shards"]) == (4, 4)
    assert recording.about.options["input"]["tokens"] == sum(map(len, IDS))


def test_documents_are_counted_and_the_others_are_listed(out: Path) -> None:
    result = load_result(out)
    listed = dict(result.table.listed)
    assert set(listed) == {"broken.txt", "empty.txt", *(f"lines.jsonl:{n}" for n in (3, 4, 5, 6, 8))}
    assert listed["broken.txt"] == "byte 7 (0xff) is not UTF-8"
    assert listed["empty.txt"] == "is empty: it has no tokens"
    assert listed["lines.jsonl:8"] == "has token id 99999, expected 0 to 2047"
    assert result.table.left_out == 7
    assert result.recording.about.options["survey"]["left_out"] == 7


def test_a_file_that_cannot_be_opened_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("import torch\n" * 9)
    (corpus / "b.txt").write_text("x")
    read = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:  # root may open any file
        if path.name == "b.txt":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    survey("text", corpus, tmp_path / "out", **SHORT)
    assert load_result(tmp_path / "out").table.listed == [("b.txt", "cannot be read: Permission denied")]


def _score_of_rows(overlap: Tensor, chance: Tensor) -> float:
    """The score of one head, over the rows that are not NaN and have more than the pattern's keys to choose from."""
    counts = ~overlap.isnan() & (chance < 1)
    return max(0.0, float((overlap - chance)[counts].sum() / (1 - chance)[counts].sum()))


def _scores_of(model: Small, ids: list[int], head: int) -> dict[str, float]:
    """The scores of one causal document by their definition, from the dense weights in float64."""
    with torch.inference_mode():
        x = model.embedding(torch.tensor([ids]))
        p = model.attention(x, mask=masks.causal(), need_weights=True)[1][0, head].double()  # [T, T]
    T, copies = len(ids), [[j for j in range(i) if ids[j] == ids[i]] for i in range(len(ids))]
    chance = 1 / torch.arange(1.0, T + 1, dtype=torch.float64)
    previous = torch.tensor([math.nan, *p.diagonal(-1)], dtype=torch.float64)
    induction = torch.tensor(
        [sum(p[i, j + 1] for j in at if j + 1 < i) if at else math.nan for i, at in enumerate(copies)]
    )
    near = torch.stack([p[i, max(0, i - 3) :].sum() - max(0, p[i].max() - max(1 / 4, chance[i])) for i in range(T)])
    near[:7] = math.nan  # an even row has more than half within 3 positions
    return {
        "previous": _score_of_rows(previous, chance),
        "first": _score_of_rows(p[:, 0], chance),
        "induction": _score_of_rows(induction, chance),
        "local": _score_of_rows(near, (4 * chance).clamp_max(1)),
        "uniform": _score_of_rows((-torch.xlogy(p, p).sum(-1)).exp() * chance, chance),
    }


def test_documents_are_ranked_by_the_score_of_a_head_in_them(tmp_path: Path) -> None:
    model = Small()
    survey(model, IDS, tmp_path / "out", shard_tokens=20, context=64, what=WHAT)
    table = load_result(tmp_path / "out").table
    scores = {f"item {number}": _scores_of(model, ids, 1) for number, ids in enumerate(IDS[:3])}  # the last is short
    for name in ("previous", "induction", "first", "uniform", "local"):
        found = table.titles_of("attention", 1, name)
        expected = sorted((each[name] for each in scores.values()), reverse=True)
        assert_close([score for _, score in found], expected, rtol=1e-6, atol=1e-7)
        assert all(abs(score - scores[title][name]) < 1e-6 for title, score in found)
        assert abs(table.quantile("attention", 1, name, 0.5) - expected[1]) <= 0.006


def test_entropies_by_the_number_of_visible_keys_are_those_of_the_rows(tmp_path: Path) -> None:
    model = Small()
    survey(model, IDS[:1], tmp_path / "out", context=64, what=WHAT)
    table = load_result(tmp_path / "out").table
    with torch.inference_mode(), headscope.watch(model, what=Observe(keep_rows=True)) as seen:
        model(torch.tensor(IDS[:1]))
    entropy = seen.stats.kept[0].values["entropy"][0]  # [H, 36], row i has i + 1 visible keys
    assert table.length_count[:7, 0].tolist() == [1, 2, 4, 8, 16, 5, 0]
    for n, (start, stop) in enumerate([(0, 1), (1, 3), (3, 7), (7, 15), (15, 31), (31, 36)]):
        assert_close(table.length_sum[n], entropy[:, start:stop].sum(-1).double())


def test_the_spread_over_shards_holds_the_score_of_each(out: Path) -> None:
    result = load_result(out)
    folder = Folder(out)
    scores: list[float] = []
    layer = result.recording.layers[2]
    for path in sorted(folder.shards.glob("*[0-9].safetensors")):
        scores += [
            each.score
            for each in patterns(Recording.load(path)).scores
            if (each.layer, each.head, each.pattern) == (layer, 3, "previous")
        ]
    assert len(scores) > 2, "some shards have too few rows"
    assert result.spread[layer]["previous"][3] == [min(scores), max(scores)]


def test_a_complete_survey_is_returned_without_running_the_model(out: Path, corpus: Path) -> None:
    events: list[str] = []
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    recording = survey("text", corpus, out, **SHORT, progress=lambda progress: events.append(progress.event))
    assert events == ["end"]
    assert recording.forwards > 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_the_header_of_a_file_is_written_in_one_order() -> None:
    def encode(header: str) -> bytes:
        return len(header).to_bytes(8, "little") + header.encode() + b"data"

    one, other = encode('{"b": 1, "a": {"d": 2, "c": 3}}  '), encode('{"a":{"c":3,"d":2},"b":1}')
    assert canonical(one) == canonical(other)
    length = int.from_bytes(canonical(one)[:8], "little")
    assert length % 8 == 0
    assert json.loads(canonical(one)[8 : 8 + length]) == {"b": 1, "a": {"d": 2, "c": 3}}
    assert canonical(one).endswith(b"data")


def test_the_model_is_in_its_mode_again_and_so_are_the_threads(tmp_path: Path) -> None:
    model = Small().train()
    model.embedding.eval()
    threads = torch.get_num_threads()
    survey(model, IDS, tmp_path / "out", context=16, threads=2)
    assert [module.training for module in (model, model.embedding, model.attention)] == [True, False, True]
    assert torch.get_num_threads() == threads


def test_a_layer_that_runs_twice_counts_both_times(tmp_path: Path) -> None:
    class Twice(Small):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.attention(self.embedding(ids), mask=masks.causal())
            return self.attention(x, mask=masks.causal())

    recording = survey(Twice(), IDS[:3], tmp_path / "out", context=40, what=WHAT)
    assert recording[0].rows.tolist() == [2 * (36 + 40 + 36)] * 2  # pyright: ignore[reportAttributeAccessIssue]
    table = load_result(tmp_path / "out").table
    scores = dict(table.titles_of("attention", 0, "first"))
    assert scores.keys() == {"item 0", "item 1", "item 2"}
    room = {f"item {at}": sum(1 - 1 / n for n in range(1, length + 1)) for at, length in enumerate((36, 40, 36))}
    of_all = patterns(recording).of("attention", 0)["first"]
    assert of_all.exact
    assert_close(sum(scores[name] * room[name] for name in room) / sum(room.values()), of_all.score, rtol=1e-6, atol=0)


def test_a_layer_whose_batch_is_not_that_of_the_documents_is_refused() -> None:
    q = torch.randn(6, 2, 5, 8)
    stats = headscope.observe(q, q, what=Observe(keep_rows=True)).named("attention")
    read = partial(values_of, names=("entropy",))
    assert rows_of(stats, 6, read).shape == (1, 6, 2, 5)
    with pytest.raises(SurveyError, match="model: layer attention attends in a batch of 6, expected 3, that of the"):
        rows_of(stats, 3, read)


def test_another_number_of_tokens_in_a_shard_changes_nothing_but_rounding(tmp_path: Path) -> None:
    several = [
        survey(Small(), IDS, tmp_path / f"{size}", shard_tokens=size, context=16, what=WHAT) for size in (10, 10_000)
    ]
    one, other = (recording["entropy"] for recording in several)
    assert_close(one.mean, other.mean)  # pyright: ignore[reportAttributeAccessIssue]
    counts = [recording.about.options["survey"]["shards"] for recording in several]
    assert counts[0] > counts[1] == 1


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": Small(seed=1)}, r"another model \(its weights or its configuration\)"),
        ({"context": 15}, "another context; expected 16, got 15"),
        ({"shard_tokens": 21}, "another shard_tokens; expected 20, got 21"),
        ({"what": Observe(map=5)}, "another set of statistics; expected edges=2, map=4, .*, got edges=0, map=5"),
        ({"threads": 2}, "another number of threads; expected 1, got 2"),
        ({"tokenizer": load_example("text").tokenizer}, "another tokenizer"),
        ({"data": IDS[:3]}, "holds a survey of other data; items: expected 4 items, got 3"),
        ({"data": [*IDS[:3], [1, 3]]}, "items: has changed since the survey was started"),
        ({"resume": False}, "holds a survey already; use another folder, or resume=True"),
    ],
)
def test_the_folder_of_another_survey_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"model": Small(), "data": IDS, "shard_tokens": 20, "context": 16, "what": WHAT}
    survey(**arguments, out=tmp_path)
    before = sorted(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(SurveyError, match=message):
        survey(**{**arguments, **change}, out=tmp_path)
    assert sorted(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()) == before


@pytest.mark.parametrize("name", ["headscope", "torch", "format", "cpu"])
def test_the_folder_of_another_version_or_machine_is_refused(name: str, tmp_path: Path) -> None:
    survey(Small(), IDS, tmp_path, context=16)
    path = tmp_path / "survey.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: "another"}))
    with pytest.raises(SurveyError, match=r"holds a survey with another .*; expected another, got"):
        survey(Small(), IDS, tmp_path, context=16)


def test_a_corpus_that_was_changed_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    survey("text", corpus, tmp_path / "out", **SHORT)
    text = (corpus / "a.py").read_text()
    (corpus / "a.py").write_text(text)  # as it was
    survey("text", corpus, tmp_path / "out", **SHORT)
    (corpus / "a.py").write_text(text.swapcase())
    with pytest.raises(SurveyError, match=r"a.py: has changed since the survey was started"):
        survey("text", corpus, tmp_path / "out", **SHORT)
    (corpus / "a.py").rename(corpus / "a2.py")
    with pytest.raises(SurveyError, match=r"holds a survey of other data; expected a.py, got a2.py"):
        survey("text", corpus, tmp_path / "out", **SHORT)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"what": Observe(keep_qk=True)}, SurveyError, "what: keep_qk: not supported in a survey"),
        ({"what": Observe(rows=torch.ones(4, dtype=torch.bool))}, SurveyError, "what: rows: not supported"),
        ({"what": Observe(row_stats=False)}, SurveyError, "what: row_stats: got False, expected True"),
        ({"what": {"map": 3}}, TypeError, "what: got dict, expected a headscope.Observe"),
        ({"what": Observe(rows=3), "rows": 4}, SurveyError, "rows: was passed twice"),
        ({"shard_tokens": 0}, ValueError, "shard_tokens: got 0, expected a whole number from 1"),
        ({"context": 0}, ValueError, "context: got 0"),
        ({"model": "digits"}, TypeError, "model: got str, expected a torch.nn.Module"),
        ({"data": ["a text"]}, SurveyError, "tokenizer: is required for texts such as item 0"),
        ({"data": [[99], [-1]]}, SurveyError, "data: no document can be read; item 0: "),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    arguments: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"model": Small(), "data": IDS, "out": tmp_path / "out"}
    if arguments.get("data") == [[99], [-1]]:
        given["model"] = load_example("text")
        arguments = {"data": [[9999], [-1]]}
    with pytest.raises(kind, match=message):
        survey(**{**given, **arguments})


def test_a_context_above_that_of_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SurveyError, match=r"context: got 257, expected at most 256, the context of the model"):
        survey("text", IDS, tmp_path, context=257)


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SurveyError, match=r"out: .*: holds notes.txt and no survey; expected a new or empty folder"):
        survey(Small(), IDS, tmp_path)
    with pytest.raises(SurveyError, match=r"notes.txt: is not a folder"):
        survey(Small(), IDS, tmp_path / "notes.txt")
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_full_disk_raises_and_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if str(target).endswith("000001.safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match=r"No space left on device: .*000001.safetensors"):
            survey(Small(), IDS, out, shard_tokens=20, context=16, what=WHAT)
    names = sorted(path.name for path in out.rglob("*") if path.is_file())
    assert names == ["000000.documents.safetensors", "000000.safetensors", "shards.json", "survey.json"]
    survey(Small(), IDS, out, shard_tokens=20, context=16, what=WHAT)
    assert (out / "seen.safetensors").exists()


@pytest.mark.parametrize("kind", ["safetensors", "documents.safetensors"])
def test_a_damaged_shard_is_named_and_computed_again(kind: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"shard_tokens": 20, "context": 16, "what": WHAT}
    survey(Small(), IDS, tmp_path, **arguments)
    expected = (tmp_path / "seen.safetensors").read_bytes()
    (tmp_path / "seen.safetensors").unlink()
    path = tmp_path / "shards" / f"000001.{kind}"
    path.write_bytes(path.read_bytes()[:-9] + b"\x00" * 8)
    with pytest.raises(SurveyError, match=r"000001.*is damaged.*run the survey again to compute this shard again"):
        survey(Small(), IDS, tmp_path, **arguments)
    survey(Small(), IDS, tmp_path, **arguments)
    assert (tmp_path / "seen.safetensors").read_bytes() == expected


def test_an_incomplete_survey_has_no_result(tmp_path: Path) -> None:
    with pytest.raises(SurveyError, match=r"is not the folder of a survey: it has no survey.json"):
        load_result(tmp_path)
    survey(Small(), IDS, tmp_path, context=16)
    (tmp_path / "seen.safetensors").unlink()
    with pytest.raises(SurveyError, match="the survey is not complete; run it again to continue it"):
        load_result(tmp_path)


def test_documents_of_an_earlier_format_are_refused(tmp_path: Path) -> None:
    survey(Small(), IDS, tmp_path, context=16)
    path = tmp_path / "documents.safetensors"
    path.write_bytes(path.read_bytes().replace(b'\\"format\\": 2', b'\\"format\\": 1'))
    with pytest.raises(
        ValueError, match=r"documents.safetensors: has format 1, expected 2; survey into another folder"
    ):
        load_result(tmp_path)


def test_quantiles_without_documents_are_undefined(tmp_path: Path) -> None:
    survey(Small(), [[1, 2, 3]], tmp_path, context=16)  # too few rows
    table = load_result(tmp_path).table
    assert math.isnan(table.quantile("attention", 0, "first", 0.5))
    assert table.titles_of("attention", 0, "first") == []
