"""``headscope survey``: exact statistics of every head over a corpus, by one process or by many."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headscope._support.progress import progress_line
from headscope._support.text import visible
from headscope.cli._shared.console import SIZE, print_json, say, warnings_as_notes
from headscope.cli._shared.mistakes import Mistake, name_options
from headscope.cli._shared.survey_progress import SurveyProgress, is_first_rank

if TYPE_CHECKING:
    from headscope.cli._shared.model_loading import Loaded
    from headscope.watching import Recording

ARGUMENTS = {  # of ``headscope.survey.survey``, and the options that they come from
    "shard_tokens": "--shard-tokens",
    **{name: f"--{name}" for name in ("data", "out", "context", "include", "field", "threads")},
}


@click.command(short_help="Measure every head of a model over a corpus.")
@click.argument("model")
@click.option(
    "--data", multiple=True, required=True, metavar="PATH", help="A file or a folder; .jsonl: a document in each line."
)
@click.option("--out", required=True, metavar="DIR", help="A new folder, or that of the same survey to continue it.")
@click.option(
    "--include", multiple=True, metavar="PATTERN", help="Read only these files of folders, as '*.py'; repeatable."
)
@click.option("--field", default="text", metavar="NAME", help="Field of a JSON line with the text.  [default: text]")
@click.option("--context", type=SIZE, help="Tokens in a window.  [default: what the model allows, up to 2048]")
@click.option("--shard-tokens", type=SIZE, default=65536, help="Tokens in a shard, about.  [default: 65536]")
@click.option("--rows", type=SIZE, help="Observe an even sample of N queries in each window.  [default: all]")
@click.option("--threads", type=SIZE, default=1, help="Threads of each process.  [default: 1]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and progress as JSON lines on stderr.")
def survey(model: str, data: tuple[str, ...], out: str, as_json: bool, **options: Any) -> int:
    """Measure every attention head of MODEL over a corpus: text files, folders, or files of JSON lines.

    MODEL is "text" (shipped with headscope), a folder with a Hugging Face model, or its name on the hub.

    Start the same command several times, on one machine or on many that share DIR, or under torchrun: the processes
    share the work. The result is the same to the bit, whatever their number, and if some are killed. Run the command
    again to continue an interrupted survey. DIR/survey.html is the page, DIR/seen.safetensors the recording.
    """
    with progress_line("loading torch"):
        import_module("torch")
    for option, paths in (("--data", data), ("--out", (out,))):
        if "" in paths or any("\0" in path for path in paths):
            raise Mistake(f"{option}: {'is empty' if '' in paths else 'not a valid file name'}, expected a path")
    loaded = _load(model)
    with SurveyProgress(as_json) as progress:
        recording = _run(loaded, data, out, progress, options)
    if is_first_rank():
        _show(loaded, recording, out, progress, as_json)
    return 0


def _load(model: str) -> Loaded:
    """Return the model.

    Raises:
        Mistake: it cannot be loaded, or reads images.
    """
    from headscope.cli._shared.model_loading import load

    with progress_line(f"loading {model}"):
        loaded = load(model)
    if loaded.takes != "text":
        raise Mistake(f"MODEL: {loaded.name} reads images, expected a model of text")
    return loaded


def _run(
    loaded: Loaded, data: tuple[str, ...], out: str, progress: SurveyProgress, options: dict[str, Any]
) -> Recording:
    """Run the survey.

    Raises:
        Mistake: an argument does not fit, a file cannot be written, or the model cannot be watched.
    """
    from headscope.cli._shared.model_loading import quiet_transformers
    from headscope.survey import Subject, SurveyError, survey
    from headscope.watching import WatchError

    if loaded.encode is None and is_first_rank():
        say(f"headscope survey: {loaded.name}: has no tokenizer that can be read; expected documents of token ids")
    subject = Subject(
        loaded.model, loaded.name, loaded.run, loaded.encode, loaded.ends, loaded.limit or loaded.context,
        loaded.vocabulary, loaded.tokenizer, loaded.paired,
    )  # fmt: skip
    include, rows = options.pop("include"), options.pop("rows")
    try:
        with warnings_as_notes("survey"), quiet_transformers():
            return survey(
                subject, [Path(path) for path in data], out, include=include or ("*",), rows=rows, progress=progress,
                **options,
            )  # fmt: skip
    except SurveyError as error:
        raise Mistake(name_options(str(error), ARGUMENTS)) from error
    except WatchError as error:
        raise Mistake(f"{loaded.name}: {str(error).removeprefix('watch: ')}") from error
    except OSError as error:
        where = visible(str(error.filename or out))
        raise Mistake(f"--out: {where}: cannot be written: {error.strerror or error}") from error
    except (ValueError, TypeError, IndexError, RuntimeError, NotImplementedError) as error:
        problem = visible(" ".join(str(error).split()))[:300]
        raise Mistake(f"{loaded.name}: the forward pass failed: {problem}") from error


def _show(loaded: Loaded, recording: Recording, out: str, progress: SurveyProgress, as_json: bool) -> None:
    """Print the result."""
    from headscope.decisions import patterns
    from headscope.survey import survey_digest

    entry = recording.about.options["survey"]
    digests = survey_digest(out)
    answer = patterns(recording.stats)
    page = str(Path(out) / "survey.html")
    if as_json:
        print_json({
            "model": loaded.name, **entry, "tokens": recording.about.options["input"]["tokens"], "sha256": digests,
            "overhead": progress.overhead, "patterns": answer.to_dict(), "page": page,
            "recording": str(Path(out) / "seen.safetensors"),
        })  # fmt: skip
        return
    tokens = recording.about.options["input"]["tokens"]
    left = f", {entry['left_out']:,} left out" if entry["left_out"] else ""
    click.echo(f"{entry['documents']:,} documents{left}, {tokens:,} tokens, {entry['shards']:,} shards")
    counts: dict[str, int] = {}
    for each in answer.names:
        counts[each.pattern] = counts.get(each.pattern, 0) + 1
    heads = sum(part.heads for part in recording.stats.parts.values())
    named = ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    click.echo(f"Patterns of {heads:,} heads: {named or 'none'}")
    if progress.overhead is not None:
        click.echo(
            f"Overhead over the bare forward passes: {progress.overhead:.0%} (measured on {progress.compared} passes)"
        )
    click.echo("\n".join(f"sha256 {digest}  {name}" for name, digest in digests.items()))
    click.echo(f"Open in a browser: {visible(page)}")
