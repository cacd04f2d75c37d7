"""Documents and the borders of shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headscope.survey import SurveyError
from headscope.survey._corpus import Corpus, Span, open_corpus
from headscope.survey._plan import _make
from headscope.survey._work import cut
from support.surveys import write_corpus


def documents(corpus: Corpus, most: int = 100) -> list[Any]:
    spans = [span for number in range(len(corpus.sources)) for span, _ in corpus.spans(number, most)]
    return [document for span in spans for document in corpus.read(span)]


def test_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    corpus = open_corpus(write_corpus(tmp_path / "c"), ("*",), "text")
    names = ["a.py", "b.txt", "broken.txt", "empty.txt", "lines.jsonl", "more/c.py", "more/short.txt"]
    assert [source.name for source in corpus.sources] == names
    some = open_corpus(tmp_path / "c", ("*.py",), "text")
    assert [source.name for source in some.sources] == ["a.py", "more/c.py"]


@pytest.mark.parametrize("most", [1, 9, 64, 10_000])
@pytest.mark.parametrize(
    "text", ["a\nbb\n\nccc", "ä" * 50, "\U0001f98a" * 50, "", "\n", "x" * 64, "one\n" * 40],
    ids=["short lines", "two bytes each", "four bytes each", "empty", "a line end", "no line end", "lines"],
)  # fmt: skip
def test_parts_of_a_text_are_the_text(most: int, text: str, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(text)
    read = documents(open_corpus(tmp_path / "t.txt", ("*",), "text"), most)
    assert "".join(document.text for document in read) == text
    assert all(len(document.text.encode()) <= max(most, 8) for document in read)


def test_a_text_is_cut_after_a_line(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("one\ntwo\nthree\n")
    read = documents(open_corpus(tmp_path / "t.txt", ("*",), "text"), 9)
    assert [(document.name, document.text) for document in read] == [
        ("t.txt (part 1)", "one\ntwo\n"),
        ("t.txt (part 2)", "three\n"),
    ]


@pytest.mark.parametrize("most", [1, 30, 10_000])
def test_each_line_is_a_document_and_bad_ones_are_named_with_the_reason(most: int, tmp_path: Path) -> None:
    write_corpus(tmp_path / "c")
    read = documents(open_corpus(tmp_path / "c" / "lines.jsonl", ("*",), "text"), most)
    assert [document.name for document in read] == [f"lines.jsonl:{n}" for n in range(1, 11)]
    problems = {document.name[-2:]: document.problem for document in read if document.problem is not None}
    assert problems == {
        ":3": "is not JSON: Expecting property name enclosed in double quotes",
        ":4": "has no text; it has body",
        ":5": "is empty",
        ":6": "is int, expected a text or a list of token ids",
    }
    assert read[6].ids == [5, 7, 9] * 7


def test_a_line_that_is_too_long_is_named_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headscope.survey._corpus.LONGEST", 20)
    (tmp_path / "t.jsonl").write_text('"' + "a" * 61 + '"\n"b"\n' + '"' + "c" * 30 + '"')
    first, second, third = documents(open_corpus(tmp_path / "t.jsonl", ("*",), "text"))
    assert (first.problem, third.problem) == ("is too long, expected at most 20 bytes",) * 2
    assert second.text == "b"


def test_the_borders_of_shards_depend_on_the_corpus_alone(tmp_path: Path) -> None:
    write_corpus(tmp_path / "one")
    write_corpus(tmp_path / "other")
    plans = [_make(open_corpus(tmp_path / name, ("*",), "text"), 300, lambda: None) for name in ("one", "other")]
    assert plans[0]["shards"] == plans[1]["shards"]
    assert plans[0]["corpus"] == plans[1]["corpus"]
    sizes = [sum(span.stop - span.start for span in shard) for shard in plans[0]["shards"]]
    assert len(sizes) > 5
    assert all(300 <= size < 700 for size in sizes[:-1])
    (tmp_path / "other" / "a.py").write_text("changed")
    changed = _make(open_corpus(tmp_path / "other", ("*",), "text"), 300, lambda: None)
    assert changed["corpus"] != plans[0]["corpus"]


def test_items_are_texts_ids_tensors_or_dictionaries_of_them() -> None:
    items = ["a text", [1, 2], torch.tensor([3, 4]), {"text": "b"}, {"input_ids": [5]}, {"x": 1}, 7, [1, "a"], [True]]
    read = documents(open_corpus(items, ("*",), "text"), 1)
    assert [document.text for document in read if document.text is not None] == ["a text", "b"]
    assert [document.ids for document in read if document.ids is not None] == [[1, 2], [3, 4], [5]]
    assert [document.name for document in read if document.problem] == ["item 5", "item 6", "item 7", "item 8"]


def test_content_that_has_changed_since_the_plan_raises(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("before")
    corpus = open_corpus(tmp_path / "t.txt", ("*",), "text")
    ((span, size),) = corpus.spans(0, 100)
    assert size == 6
    (tmp_path / "t.txt").write_text("behind")
    with pytest.raises(SurveyError, match=r"data: t.txt: has changed since the survey was started"):
        list(corpus.read(span))
    items = open_corpus(["a", "b"], ("*",), "text")
    with pytest.raises(SurveyError, match="has changed"):
        list(items.read(Span(0, 0, 2, 0, "another")))


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        ("none", SurveyError, "data: .*none: no such file or folder"),
        ("a" * 300, SurveyError, "data: a+: no such file or folder"),
        (".", SurveyError, r"data: .*: has no files that match \*.md"),
        ([], SurveyError, "data: is empty, expected at least one document"),
        (3, TypeError, "data: got int, expected a path, paths, or a sequence of documents"),
        ({"text": "a"}, TypeError, "data: got dict"),
        (["c/a.py"], SurveyError, "data: c/a.py: is the name of a file; pass files as pathlib.Path"),
    ],
)
def test_data_of_another_kind_is_refused(
    data: Any, kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=message):
        open_corpus(data, ("*.md",), "text")


def test_a_saved_dataset_is_refused_with_the_remedy(tmp_path: Path) -> None:
    for name in ("dataset_info.json", "state.json"):
        (tmp_path / name).write_text(json.dumps({}))
    with pytest.raises(SurveyError, match=r"load it in Python: .*load_from_disk"):
        open_corpus(tmp_path, ("*",), "text")


@pytest.mark.parametrize("count", [1, 5, 6, 7, 11, 12, 13, 40])
def test_windows_cover_a_document_and_differ_by_at_most_one_token(count: int) -> None:
    windows = [*cut(range(count), 8, ([90], [91]))]
    assert [each for window in windows for each in window[1:-1]] == [*range(count)]
    assert all(window[0] == 90 and window[-1] == 91 and len(window) <= 8 for window in windows)
    assert len(windows) == -(-count // 6)
    lengths = [len(window) for window in windows]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
