"""``headscope check``: find the mistakes in the attention modules of a file, several files, or a folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from headscope._support.progress import progress_line
from headscope._support.text import visible
from headscope.cli._check.conventions import name_remedies
from headscope.cli._check.processes import ask_child as _ask_child
from headscope.cli._shared.console import SIZE, console, one_line, print_json, say
from headscope.cli._shared.mistakes import Mistake

if TYPE_CHECKING:
    from headscope.checking import Findings
    from headscope.cli._check.results import ClassResults
    from headscope.cli._check.targets import Submission

PROBLEMS = 1  # exit code
SECONDS_OF_ONE, SECONDS_OF_EACH = 60, 30  # the default time limit of a single file, and of each of several


@click.command(short_help="Find the mistakes in an attention module, or in a folder of them.")
@click.argument("targets", metavar="FILE.py[:NAME]|FOLDER...", nargs=-1)
@click.option("--model", metavar="DIR", help="Check a whole model instead: a folder with a Hugging Face model.")
@click.option("--args", metavar="ARGS", help='Arguments that build the module: --args "512, 8, causal=True".')
@click.option("--class", "class_", metavar="NAME", help="What to check in each file.  [default: its only module class]")
@click.option("--call", metavar="EXPR", help='How to call it: --call "module(x, x, x, mask)[0]".')
@click.option("--embed-dim", type=SIZE, help="E, width of the input.  [default: from the weights]")
@click.option("--heads", type=SIZE, help="H, the intended number of heads.")
@click.option("--causal/--not-causal", default=None, help="Whether later tokens must be masked.")
@click.option("--batch-first/--length-first", default=None, help="Whether the input is [B, T, E] or [T, B, E].")
@click.option(
    "--mask-means",
    type=click.Choice(["keep", "hide", "add"]),
    help="What a mask means: True = keep (attend), True = hide, or add to the scores.",
)
@click.option("--scale", type=float, metavar="X", help="Intended factor of q·k.  [default: 1/√D]")
@click.option("--length", type=SIZE, help="Intended sequence length; from 1024 on, slow paths are reported.")
@click.option(
    "--reproducible", is_flag=True, default=None, help="Also check that a batch entry gives the same bits in any batch."
)
@click.option("--strict", is_flag=True, default=None, help="A fragile finding fails as well, not only a wrong one.")
@click.option("--ignore", multiple=True, metavar="NAME", help="A finding that is not reported. Repeatable.")
@click.option("--only", multiple=True, metavar="NAME", help="Report this finding and no other. Repeatable.")
@click.option("--refuse", multiple=True, metavar="NAME", help="A finding that fails as well. Repeatable.")
@click.option(
    "--config", metavar="FILE", help="These options as TOML.  [default: check.toml in the folder, or above it]"
)
@click.option("--pattern", metavar="GLOB", help="Names of the files in a folder.  [default: *.py]")
@click.option("--jobs", type=SIZE, help="Files at a time.  [default: one for each core]")
@click.option(
    "--timeout", type=SIZE,
    help=f"Seconds after which a file is stopped.  [default: {SECONDS_OF_ONE}; {SECONDS_OF_EACH} for several files]",
)  # fmt: skip
@click.option("--table", is_flag=True, help="Print a table of the files, also for a single one.")
@click.option("--json", is_flag=True, help="Print JSON.")
@click.option("--csv", is_flag=True, help="Print CSV, a line for each file.")
def check(targets: Sequence[str], model: str | None, config: str | None, jobs: int | None, **options: Any) -> int:
    """Find the mistakes in attention modules, or in a whole model, by what they compute.

    \b
    A finding is
      wrong    the module computes something else           fails
      fragile  right here, breaks under a stated condition  fails with --strict
      unusual  it may be intended                           fails with --refuse NAME
      slow     right, but costs time or memory              fails with --refuse NAME

    NAME is a class or function that builds a module (with --args, if it needs arguments), a module, or a function that
    attends (with --embed-dim). A file with one module class needs no NAME. For a folder, or several files, each file
    is checked in a process of its own, and a table shows who fails and which mistakes are most frequent.

    The files are imported and run in separate processes with a time limit and without network access from Python;
    processes that the code starts end with it. This is not a sandbox: check only code that you trust.

    With --model, the folder is read offline; only .safetensors are read, and no code of its repository is run.

    The exit code is 0 if no file fails, also if one is incomplete; 1 if one fails, or could not be checked among
    several; 2 after a mistake in the options, or if a single file could not be checked or has no attention.
    """
    from headscope.cli._check.targets import is_one_file, list_submissions

    if model is not None:
        from headscope.cli._shared.model_check import check_folder_model

        return check_folder_model(model, targets, {"config": config, "jobs": jobs, **options})
    if not targets:
        raise Mistake("targets: missing, expected FILE.py:NAME, a folder, or --model DIR")
    forms = [name for name in ("table", "json", "csv") if options.pop(name)]
    if len(forms) > 1:
        raise Mistake(f"--{forms[0]}: got --{forms[1]} as well, expected one of --table, --json and --csv")
    form = forms[0] if forms else ""
    options["class"] = options.pop("class_")
    submissions = list_submissions(targets, config, options)
    if is_one_file(targets) and form in ("", "json"):
        return _check_one(submissions[0], as_json=form == "json")
    results = _check_class(submissions, jobs)
    if form == "json":
        print_json(results.to_dict())
    elif form == "csv":
        click.echo(results.to_csv(), nl=False)
    else:
        from headscope.cli._check.result_table import render_results

        console().print(*render_results(results), sep="\n")
    return PROBLEMS if results.fails else 0


def _check_one(submission: Submission, *, as_json: bool) -> int:
    """Print the findings of a single file."""
    from headscope.cli._check.results import describe_absence

    say(f"headscope check: running {visible(str(submission.path))} in a separate process")
    request = submission.conventions.to_request(submission.path, submission.name, SECONDS_OF_ONE)
    with progress_line("checking"):
        answer = _ask_child(request, request["timeout"])
    if "mistake" in answer:
        raise Mistake(name_remedies(str(answer["mistake"])))
    findings = answer["findings"]
    if "note" in answer:
        say(f"headscope check: {one_line(str(answer['note']))}")
    if as_json:
        print_json(findings)
    else:
        console().print(_parse_findings(findings).table())
    return PROBLEMS if findings["fails"] else Mistake.exit_code if describe_absence(findings) else 0


def _check_class(submissions: Sequence[Submission], jobs: int | None) -> ClassResults:
    """Check several files, and write a line on stderr for each as it is done."""
    from headscope.cli._check.class_runner import count_jobs, run_requests
    from headscope.cli._check.results import ClassResults, Result

    count = len(submissions)
    jobs = min(jobs or count_jobs(), count)
    say(f"headscope check: running {count} file{'s' if count > 1 else ''} in separate processes, {jobs} at a time")
    requests = [each.conventions.to_request(each.path, each.name, SECONDS_OF_EACH) for each in submissions]
    results: dict[int, Result] = {}
    for index, answer in run_requests(requests, jobs):
        label, file = submissions[index].label, visible(submissions[index].path.name)
        error = one_line(name_remedies(str(answer.get("mistake", "")))).removeprefix(f"{file}: ")
        note = one_line(str(answer.get("note", ""))).removeprefix(f"{file}: ")
        results[index] = Result.of(label, answer.get("findings"), error, note)
        say(f"[{len(results)}/{count}] {label}: {results[index].describe()}")
    return ClassResults.of([results[index] for index in range(count)])


def _parse_findings(answer: dict[str, Any]) -> Findings:
    """Return the findings of an answer, with control characters escaped."""
    from headscope.checking import Finding, Findings

    keys = ("name", "severity", "seen", "why", "fix", "code", "condition")
    texts: list[dict[str, Any]] = [{key: visible(each[key]) for key in keys} for each in answer["findings"]]
    parts = tuple(Finding(**each) for each in texts)
    rest = {visible(what): visible(why) for what, why in answer["not_tested"].items()}
    lists = ("understood", "omitted", "refused", "missing")
    understood, omitted, refused, missing = (tuple(map(visible, answer[key])) for key in lists)
    return Findings(visible(answer["subject"]), parts, understood, rest, answer["strict"], omitted, refused, missing)
