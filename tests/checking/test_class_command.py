"""headscope check of a folder: submissions of many styles, submissions that do harm, and what the teacher gets."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from headscope.cli import main
from headscope.cli._check import class_runner
from headscope.cli._check.class_runner import run_requests
from headscope.cli._check.conventions import combine_conventions
from headscope.cli._check.results import ClassResults, Result
from support.forking import run_program
from support.paths import PROGRAMS, ROOT

SUBMISSIONS = ROOT / "tests" / "support" / "submissions"
FIRST = {
    "bool_mask_added": "bool-mask-added",
    "dropout_always": "dropout-in-eval",
    "mask_after_softmax": "mask-after-softmax",
    "mask_forgotten": "mask-ignored",
    "mask_inverted": "mask-inverted",
    "merge_without_transpose": "heads-merged-wrong",
    "no_scale": "scale-missing",
    "output_layer_unused": "no-output-projection",
    "scale_without_root": "scale-without-root",
    "sees_one_ahead": "sees-one-ahead",
    "softmax_over_heads": "softmax-over-heads",
    "softmax_over_queries": "softmax-over-queries",
    "squeezed": "fails-on-batch-of-one",
    "tiny_fill": "mask-fill-too-small",
    "values_from_keys": "values-are-keys",
    "view_without_transpose": "heads-split-wrong",
}
needs_fork = pytest.mark.skipif(not class_runner.CAN_FORK, reason="this system does not fork")
ATTENTION = """
from torch import nn
class Attention(nn.Module):
    def __init__(self, width, heads, fill=float("-inf")):
        super().__init__()
        self.heads, self.fill = heads, fill
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
    def forward(self, x, mask=None):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        s = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        s = s if mask is None else s.masked_fill(mask == 0, self.fill)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""


FORKED = (PROGRAMS / "forked_check.py").read_text(encoding="utf-8")


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command; it and the processes that it starts have imported torch."""
    return run_program(FORKED, "check", *arguments)


@pytest.fixture(scope="module")
def judged() -> dict[str, Any]:
    """The results of all submissions."""
    run = run_check(str(SUBMISSIONS), "--json")
    assert run.returncode == 1, run.stderr
    return json.loads(run.stdout)


def list_files(kind: str) -> list[str]:
    return sorted(path.stem for path in (SUBMISSIONS / kind).glob("*.py"))


def find_file(judged: dict[str, Any], label: str) -> dict[str, Any]:
    return next(each for each in judged["files"] if each["file"] == label)


def test_there_are_enough_styles_and_every_textbook_fill() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (SUBMISSIONS / "right").glob("*.py")]
    assert len(texts) == 25
    for fill in ("float('-inf')", "-torch.inf", "-1e9", "-1e6", "-9e15", "-1e20", "finfo(score.dtype).min"):
        assert any(fill in text for text in texts), fill
    assert set(list_files("wrong")) == FIRST.keys()


@pytest.mark.parametrize("name", list_files("right"))
def test_nothing_is_wrong_with_a_right_submission(name: str, judged: dict[str, Any]) -> None:
    result = find_file(judged, f"right/{name}.py")
    assert result["error"] == ""
    severities = {finding["name"]: finding["severity"] for finding in result["findings"]["findings"]}
    assert set(severities.values()) <= {"fragile"}, severities
    assert result["outcome"] in ("passed", "incomplete")


@pytest.mark.parametrize("name", FIRST)
def test_the_first_finding_of_a_wrong_submission_names_its_mistake(name: str, judged: dict[str, Any]) -> None:
    result = find_file(judged, f"wrong/{name}.py")
    assert result["outcome"] == "failed", result["error"]
    first = result["findings"]["findings"][0]
    assert (first["name"], first["severity"]) == (FIRST[name], "wrong")


def test_the_misconceptions_are_counted_and_the_most_frequent_is_first(judged: dict[str, Any]) -> None:
    labels = [each["file"] for each in judged["files"]]
    assert labels == sorted(labels)
    assert judged["counts"] == {"passed": 22, "incomplete": 3, "failed": len(FIRST), "not checked": 0}
    counts = [each["count"] for each in judged["misconceptions"]]
    assert counts == sorted(counts, reverse=True)
    first = judged["misconceptions"][0]
    assert (first["name"], first["severity"]) == ("fp16-overflow", "fragile")
    assert "right/cloned_layers.py" in first["files"]


# ---------------------------------------------------------------- submissions that do harm

WRITES = "import time\nfor _ in range(2000): print('\\x1b' * 10000)\ntime.sleep(60)"  # more than a pipe holds

HARM = {
    "asks.py": ("name = input('name? ')", "import failed: EOFError"),
    "crashes.py": ("import ctypes\nctypes.string_at(0)", "the code ended its process (SIGSEGV) before the check"),
    "ends.py": ("import os\nos._exit(0)", "the code ended its process (exit code 0) before the check was done"),
    "exits.py": ("import sys\nsys.exit(0)", "the file calls sys.exit() when it is imported"),
    "interrupts.py": ("raise KeyboardInterrupt", "before the check was done: KeyboardInterrupt:"),
    "keeps.py": ("import time\ntime.sleep(0.5)" + ATTENTION, ""),  # runs beside the next one, and again by itself
    "kills.py": ("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(9)", "ended the process that checks all files"),
    "none.py": ("def attend(x): return x", "defines no class of nn.Module, expected one"),
    "raises.py": ("raise ValueError('\\x1b[31m\\n=1')", "import failed: ValueError: \\x1b[31m =1"),
    "several.py": (ATTENTION + "class Other(Attention): pass", "has 2 module classes: Attention, Other; choose one"),
    "syntax.py": ("def f(:", "import failed: SyntaxError"),
    # both run until the end, so that their times pass together
    "waits.py": ("import time\ntime.sleep(60)", "--timeout: the code was stopped after 4 seconds"),
    "writes.py": (WRITES, "--timeout: the code was stopped after 4 seconds"),
    "=1 ünïcode.py": (ATTENTION + "import torch\ntorch.softmax = None", ""),
}


@needs_fork
def test_a_submission_that_does_harm_affects_only_its_own_result(tmp_path: Path) -> None:
    for name, (code, _) in HARM.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    (tmp_path / ".hidden.py").write_text("1 / 0")
    (tmp_path / "__init__.py").write_text("1 / 0")
    (tmp_path / "hw.ipynb").write_text("{}")

    run = run_check(str(tmp_path), "--args", "24, 3", "--timeout", "4", "--jobs", "2", "--csv")

    assert run.returncode == 1
    assert "\x1b" not in run.stdout + run.stderr
    rows = {row["file"]: row for row in csv.DictReader(io.StringIO(run.stdout))}
    assert list(rows) == sorted((name if name[0] != "=" else f"'{name}" for name in HARM), key=lambda x: x.strip("'"))
    for name, (_, error) in HARM.items():
        row = rows[name if name[0] != "=" else f"'{name}"]
        assert row["outcome"] == ("not checked" if error else "passed"), row
        assert error in row["error"]
    lines = run.stderr.splitlines()
    assert lines[0].endswith("1 notebook is not checked; jupyter nbconvert --to python writes Python files")
    assert [line.partition("]")[0] for line in lines[2:]] == [f"[{n}/{len(HARM)}" for n in range(1, len(HARM) + 1)]
    assert not list(tmp_path.rglob("__pycache__"))


def test_without_fork_each_file_has_a_process_that_imports_torch(tmp_path: Path) -> None:
    requests = []
    for name, code in {"right": ATTENTION, "hangs": "while True: pass"}.items():
        (tmp_path / f"{name}.py").write_text(code)
        conventions = combine_conventions(None, {"args": "24, 3", "timeout": 1 if name == "hangs" else 60})
        requests.append(conventions.to_request(tmp_path / f"{name}.py", None, 60))

    answers = dict(run_requests(requests, 2, fork=False))

    assert [each["name"] for each in answers[0]["findings"]["findings"]] == ["nan-on-empty-row"]
    assert answers[1]["mistake"] == "--timeout: the code was stopped after 1 seconds"


SLEEPS = """
import fcntl, os, sys, time
lock = open(sys.argv[0] + ".lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
open(sys.argv[0] + ".started", "w").close()
"""
STRIKES = """
while not os.path.exists(os.path.join(os.path.dirname(sys.argv[0]), "a.py.started")):
    time.sleep(0.01)
os.kill(int(os.environ["COMMAND"]), NUMBER)
"""


def is_locked(path: Path) -> bool:
    import fcntl

    deadline = time.monotonic() + 5
    with path.open() as lock:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            else:
                return False
    return True


@needs_fork
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_ends_every_submission(name: str, tmp_path: Path) -> None:
    number = getattr(signal, name)
    for stem, strikes in (("a", ""), ("b", STRIKES.replace("NUMBER", str(int(number))))):
        (tmp_path / f"{stem}.py").write_text(f"{SLEEPS}{strikes}time.sleep(60)")

    ended = run_check(str(tmp_path), "--jobs", "2")

    assert ended.returncode == (130 if name == "SIGINT" else -number)
    assert ended.stderr.endswith("headscope: interrupted\n") == (name == "SIGINT")
    assert not any(is_locked(tmp_path / f"{stem}.py.lock") for stem in "ab")


# ---------------------------------------------------------------- conventions


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "work"
    (path / "anna").mkdir(parents=True)
    (path / "anna" / "hw.py").write_text(ATTENTION)
    (path / "anna" / "notes.py").write_text("1 / 0")
    return path


def test_the_conventions_are_those_of_the_folder_unless_an_option_replaces_them(folder: Path) -> None:
    (folder / "check.toml").write_text(
        'class = "Attention"\nargs = "24, 3"\npattern = "hw*.py"\nstrict = true\ncausal = false\n'
        'only = ["nan-on-empty-row", "scale-missing"]\ncall = "module(x, mask)"\ntimeout = 50\nmask-means = "keep"\n'
    )
    run = run_check("work", "--json")
    (result,) = json.loads(run.stdout)["files"]
    assert (run.returncode, result["file"], result["outcome"]) == (1, "anna/hw.py", "failed")
    assert f"conventions of {Path('work', 'check.toml')}" in run.stderr
    assert result["findings"]["understood"][0] == "called as its own call with E = 24"

    options = {"only": ("scale-missing",), "args": "24, 3, fill=-1e9", "timeout": None}
    conventions = combine_conventions(folder / "check.toml", options)
    assert (conventions.arguments, conventions.timeout) == ("24, 3, fill=-1e9", 50)
    assert conventions.options["only"] == ["scale-missing"]

    run = run_check(str(Path("work", "anna", "hw.py")))  # those of the folder above
    assert run.returncode == 1
    assert f"conventions of {Path('work', 'check.toml')}" in run.stderr
    assert "! nan-on-empty-row  fragile\n" in run.stdout
    assert "\n  right here; breaks if a mask hides every key of a query" in run.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("head = 3", "head: unknown key; did you mean heads?"),
        ("embed_dim = 3", "embed_dim: unknown key; did you mean embed-dim?"),
        ("zzz = 3", "zzz: unknown key; expected one of class, args, call, pattern, embed-dim"),
        ("heads = '3'", "heads: got 3, expected a whole number from 1 to 1000000000"),
        ("heads = true", "heads: got True, expected a whole number"),
        ("causal = 1", "causal: got 1, expected true or false"),
        ("scale = -1", "scale: got -1, expected a finite number above 0"),
        ("scale = nan", "scale: got nan, expected a finite number above 0"),
        ("mask-means = 'True'", "mask-means: got True, expected one of keep, hide, add"),
        ("args = 24", 'args: got 24, expected a text, such as "512, 8, causal=True"'),
        ("args = '24, x'", "args: got 24, x, expected literals as in a call"),
        ("class = 'a b'", "class: got a b, expected the name of a class"),
        ("ignore = []", "ignore: got [], expected a list of names of findings"),
        ("ignore = 'scale-mising'", "ignore: got scale-mising, expected the name of a finding; did you mean scale-mi"),
        ("call = 3", "call: got 3, expected an expression of module, x and mask"),
        ("pattern = '../*.py'", "pattern: got ../*.py, expected a pattern of file names"),
        ("heads = ", "is not TOML: Invalid value"),
    ],
)
def test_a_mistake_in_the_conventions_is_one_line(
    text: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "check.toml").write_text(text)
    assert main(["check", "work"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"headscope check: {Path('work', 'check.toml')}: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["work", "--pattern", "x*.py"], "work: has no file x*.py to check"),
        (["empty"], "empty: has no file *.py to check: 2 notebooks are not checked; jupyter nbconvert"),
        (["work", "nothing"], "nothing: no such file or folder, expected FILE.py:NAME"),
        (["work", "--config", "no.toml"], "no.toml: cannot be read: No such file or directory"),
    ],
)
def test_a_mistake_in_the_targets_is_one_line(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    for name in ("a.ipynb", "b.ipynb"):
        Path("empty", name).write_text("{}")
    assert main(["check", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"headscope check: {message}")


# ---------------------------------------------------------------- results


def make_result(label: str, *findings: tuple[str, str], fails: bool = False, **not_tested: str) -> Result:
    parts = [{"name": name, "severity": severity, "text": f"{name}  {severity}"} for name, severity in findings]
    return Result(label, {"findings": parts, "fails": fails, "not_tested": not_tested, "omitted": [], "missing": []})


RESULTS = ClassResults.of(
    [
        make_result("a.py", ("scale-missing", "wrong"), ("fp16-overflow", "fragile"), fails=True, memory="no"),
        make_result("b.py", ("softmax-twice", "wrong"), fails=True, scale="no (softmax-twice)", softmax="(x)"),
        make_result("c.py", ("fp16-overflow", "fragile"), masks="no argument", softmax="(x)"),
        Result("@d.py", None, "import failed"),
        make_result("e.py", softmax="(x)"),
    ]
)


def test_a_test_that_did_not_run_counts_if_it_ran_for_another_submission() -> None:
    assert [result.missing for result in RESULTS.results] == [(), ("softmax",), ("masks", "softmax"), (), ("softmax",)]
    outcomes = [result.outcome for result in RESULTS.results]
    assert outcomes == ["failed", "failed", "incomplete", "not checked", "incomplete"]
    without = ClassResults.of([make_result("c.py", masks="no argument"), make_result("e.py", masks="no argument")])
    assert [result.outcome for result in without.results] == ["passed", "passed"]


def test_results_as_csv_and_as_data() -> None:
    lines = RESULTS.to_csv().splitlines()
    assert lines[0] == "file,outcome,wrong,fragile,unusual,slow,missing tests,error"
    assert lines[1] == "a.py,failed,scale-missing,fp16-overflow,,,,"
    assert lines[4] == "'@d.py,not checked,,,,,,import failed"
    data = RESULTS.to_dict()
    names = [(each["name"], each["count"]) for each in data["misconceptions"]]
    assert names == [("fp16-overflow", 2), ("scale-missing", 1), ("softmax-twice", 1)]
    assert data["fails"]
    assert data["counts"] == {"passed": 0, "incomplete": 2, "failed": 2, "not checked": 1}


def test_results_as_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    answers = [{"findings": RESULTS.results[1].findings}, {"mistake": "hw.py: \x1b[31mno\nmore"}]
    monkeypatch.setattr(class_runner, "run_requests", lambda requests, jobs: enumerate(answers))
    assert main(["check", "work"]) == 1
    out, err = capsys.readouterr()
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0].split() == ["file", "outcome", "findings"]
    assert lines[1].split() == ["anna/hw.py", "failed", "softmax-twice"]
    assert lines[2].strip() == "1 check skipped until softmax-twice is fixed"
    assert lines[3].strip() == "anna/notes.py  not checked  hw.py: \\x1b[31mno more"
    assert lines[5].split() == ["finding", "severity", "files"]
    assert lines[6].split() == ["softmax-twice", "wrong", "1", "anna/hw.py"]
    assert lines[8:] == ["2 files: 1 failed, 1 not checked"]
    assert "[1/2] anna/hw.py: wrong: softmax-twice\n" in err


# ---------------------------------------------------------------- what a teacher and a student met

MHA = """
import math
from torch import nn
class MHA(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        assert dim % heads == 0
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
    def forward(self, x, MASK=None):
        B, T, E = x.shape
        q, k, v = (y.view(B, T, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        s = q @ k.mT / math.sqrt(WIDTH)
        s = s if MASK is None else s.masked_fill(MASK == 0, -math.inf)
        o = s.softmax(-1) @ v
        o = o.transpose(1, 2).MERGE(B, T, E)
        return self.out(o)
"""
STATED = 'class = "MultiHeadAttention"\nargs = "35, 5"\nmask-means = "keep"\n'


def write_mha(path: Path, mask: str = "mask", width: str = "E // self.heads", merge: str = "reshape") -> None:
    path.write_text(MHA.replace("MASK", mask).replace("WIDTH", width).replace("MERGE", merge))


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], str]:
    """A folder of submissions that was checked once: the result of each file, and stderr."""
    folder = tmp_path_factory.mktemp("trial")
    (folder / "check.toml").write_text(STATED + 'refuse = ["scale-sqrt-embed-dim"]\n')
    write_mha(folder / "one.py")
    write_mha(folder / "two.py")
    (folder / "two.py").write_text((folder / "two.py").read_text() + "class Other(MHA): pass\n")
    write_mha(folder / "dora.py", mask="m")
    write_mha(folder / "emil.py", width="E")
    write_mha(folder / "hana.py", merge="view")
    (folder / "ivan.py").write_text((folder / "one.py").read_text().replace("dim, heads):", "dim, heads, depth):"))
    (folder / "nora.py").write_text((folder / "one.py").read_text().replace("heads == 0", "heads == 1"))
    run = run_check(str(folder), "--json")
    return {each["file"]: each for each in json.loads(run.stdout)["files"]}, run.stderr


def test_the_only_class_of_a_file_replaces_a_class_that_it_does_not_have(
    trial: tuple[dict[str, dict[str, Any]], str],
) -> None:
    files, _ = trial
    assert files["one.py"]["outcome"] == "passed"
    assert files["one.py"]["findings"]["subject"] == "MHA"
    assert files["one.py"]["note"] == "class MHA, because it has no MultiHeadAttention"
    assert files["two.py"]["error"] == "has no MultiHeadAttention, expected one of MHA, Other"


def test_a_class_that_is_named_with_its_file_is_not_replaced(tmp_path: Path) -> None:
    write_mha(tmp_path / "one.py")
    run = run_check(f"{tmp_path / 'one.py'}:MultiHeadAttention")
    assert (run.returncode, "has no MultiHeadAttention, expected one of MHA" in run.stderr) == (2, True)


def test_a_stated_meaning_of_masks_requires_a_mask(
    trial: tuple[dict[str, dict[str, Any]], str], tmp_path: Path
) -> None:
    result = trial[0]["dora.py"]
    assert (result["outcome"], result["missing_tests"]) == ("incomplete", ["masks", "fully masked rows"])
    assert "\nmasks: forward() has no argument with mask or pad in its name" in result["text"]

    write_mha(tmp_path / "dora.py", mask="m")  # also alone, when no other file has a mask that was tested
    run = run_check(str(tmp_path / "dora.py"), "--args", "35, 5", "--mask-means", "keep")
    assert run.returncode == 0
    assert " ".join(run.stdout.split()).startswith(
        "MHA: nothing found; masks were not tested, although mask_means (--mask-means) is specified understood"
    )


def test_an_error_of_the_code_names_its_line(trial: tuple[dict[str, dict[str, Any]], str]) -> None:
    files, err = trial
    error = files["hana.py"]["error"]
    line = "MHA: fails with x [2, 7, 35]: hana.py, line 15: o = o.transpose(1, 2).view(B, T, E) raises RuntimeError: "
    assert error.startswith(line)
    assert error.endswith("Use .reshape(...) instead")
    assert "hana.py: not checked\n" in err
    built = "MHA: cannot be built with --args '35, 5': nora.py, line 7: assert dim % heads == 1 raises AssertionError"
    assert files["nora.py"]["error"] == built
    assert files["ivan.py"]["error"].startswith("MHA: cannot be built with --args '35, 5': TypeError: ")


def test_a_refused_finding_fails_and_its_severity_remains(
    trial: tuple[dict[str, dict[str, Any]], str], tmp_path: Path
) -> None:
    result = trial[0]["emil.py"]
    assert result["outcome"] == "failed"
    fails = {each["name"]: (each["severity"], each["fails"]) for each in result["findings"]["findings"]}
    assert fails == {"nan-on-empty-row": ("fragile", False), "scale-sqrt-embed-dim": ("unusual", True)}

    write_mha(tmp_path / "emil.py", width="E")
    run = run_check(str(tmp_path / "emil.py"), "--args", "35, 5", "--refuse", "scale-sqrt-embed-dim")
    assert run.returncode == 1
    assert "· scale-sqrt-embed-dim  unusual, refused\n" in run.stdout


def test_an_unknown_name_to_refuse_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "work", "--refuse", "scale-sqrt"]) == 2
    assert capsys.readouterr().err.startswith("headscope check: --refuse: got scale-sqrt, expected the name")


def test_the_text_of_a_result_is_what_its_author_needs() -> None:
    first, second, third, broken, _ = (result.to_dict()["text"] for result in RESULTS.results)
    assert first == "failed\n\nscale-missing  wrong\n\nfp16-overflow  fragile"
    assert "1 check skipped until softmax-twice is fixed" in second
    assert third.endswith("not tested: masks, softmax\nmasks: no argument\nsoftmax: (x)")
    assert broken == "not checked: import failed"


def test_the_table_has_the_error_that_every_mask_raises(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "anna" / "hw.py").write_text(ATTENTION.replace("else s.masked_fill", "else scores.masked_fill"))
    (folder / "ben.py").write_text(ATTENTION)
    (folder / "anna" / "notes.py").unlink()
    run = run_check("work", "--args", "24, 3", "--json")
    assert run.returncode == 0, run.stderr
    files = json.loads(run.stdout)["files"]
    assert [each["file"] for each in files] == ["anna/hw.py", "ben.py"]
    answers = [{"findings": each["findings"]} for each in files]
    monkeypatch.setattr(class_runner, "run_requests", lambda requests, jobs: enumerate(answers))
    main(["check", "work", "--args", "24, 3"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "anna/hw.py incomplete not tested: mask=, fully masked rows mask=: every mask that was tried" in shown
    assert "the first was NameError: name 'scores' is not defined" in shown
    main(["check", "work", "--args", "24, 3", "--csv"])
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("anna/hw.py,")]
    assert line.endswith("the first was NameError: name 'scores' is not defined")
