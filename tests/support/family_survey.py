"""What ``watch`` records of every model family of transformers, or of timm: the tables of docs/concepts/families.md.

    python tests/support/family_survey.py [--timm] [--page] [--names bert,gpt2] [--out survey.jsonl] [--jobs 2]

Each family is built small, with random weights. A spy that knows nothing of headscope counts its attention. A watch has
to leave the outputs as they are, to the bit, and its statistics have to be those of the model's own eager weights.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import sys
import textwrap
import warnings
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support import timm_families
from support.families import Spy, UnbuiltError, are_same, build, list_names, list_tensors

SECONDS = 120  # of one family
TOLERANCE = 1e-5


def survey(name: str) -> dict[str, Any]:
    """Return what is known of a family, as plain values."""
    import headscope
    from headscope.watching import WatchError

    try:
        family = build(name, late=True)
    except UnbuiltError as error:
        return {"name": name, "unbuilt": str(error)}
    model, inputs = family.model, family.inputs
    spy = Spy()
    with torch.no_grad():
        torch.manual_seed(0)
        with spy:
            model(**inputs)
        torch.manual_seed(0)
        plain = model(**inputs)
    result: dict[str, Any] = {"name": name, "fused": spy.fused, "written": spy.written}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            torch.manual_seed(0)
            with torch.no_grad(), headscope.watch(model) as seen:
                watched = model(**inputs)
        except WatchError as error:
            return {**result, "refused": str(error)}
    result["warnings"] = [str(each.message) for each in caught if "headscope" in each.category.__module__]
    result["layers"] = len(seen.layers)
    result["same"] = are_same(plain, watched)
    return {**result, **_compare(model, inputs)}


def _compare(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Compare the statistics of a watch with the weights that the model itself returns."""
    import headscope

    try:
        model.set_attn_implementation("eager")  # type: ignore[attr-defined]
    except Exception as error:
        return {"eager": f"none: {type(error).__name__}"}
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad(), headscope.watch(model) as seen:
            out = model(**inputs, output_attentions=True)
    except Exception as error:
        return {"eager": f"none: {type(error).__name__}: {str(error)[:150]}"}
    weights = [
        x.double() for name in out if name.endswith("attentions") for x in list_tensors(out[name])
        if x.ndim == 4 and torch.allclose(x.sum(-1), torch.ones(()).to(x), atol=1e-3)
    ]  # fmt: skip
    if not weights:
        return {"eager": "no weights"}
    recorded = [seen[layer, "entropy"].mean.double() for layer in seen.layers]
    errors: list[float] = []
    for p in weights:
        entropy = torch.special.entr(p).sum(-1).mean((0, 2))  # [H]
        fitting = [
            float(((x - entropy).abs() / entropy.clamp_min(1e-3)).max()) for x in recorded if x.shape == entropy.shape
        ]
        if fitting:  # else of a layer that is not recorded, such as deformable attention
            errors.append(min(fitting))
    if not errors:
        return {"eager": "weights of other layers"}
    return {
        "eager": f"{len(errors)} weights",
        "error": max(errors),
        "unmatched": sum(not e <= TOLERANCE for e in errors),
    }


def _survey_in_time(name: str, of_timm: bool = False) -> dict[str, Any]:
    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return timm_families.survey(name) if of_timm else survey(name)
    except TimeoutError:
        return {"name": name, "unbuilt": f"took more than {SECONDS} s"}
    except Exception as error:
        return {"name": name, "crashed": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        signal.alarm(0)


DIFFERENT = {
    "albert": "one layer, whose runs are merged",
    "granite_swa": "its own weights lack the share of the sink",
    "granitemoe_swa": "its own weights lack the share of the sink",
    "lxmert": "a layer that runs twice is merged",
    "wavlm": "its own weights are means over heads",
}
"""Families whose own weights are something else than those of each head."""
OF_TIMM = "## Families of timm"
REFUSED = {
    "`TalkingHeadAttn`, `Attention2d`": "mixes the weights of heads after the softmax",
    "`XCA`, `ChannelAttention`, `CrossCovarianceAttn`": "its softmax is over channels, not over tokens",
    "`FactorAttnConvRelPosEnc`, `LambdaLayer`": "its softmax is over keys alone, without queries",
    "`OutlookAttention`, `GlobalContext`": "its softmax is of a projection, not of products of queries and keys",
    "`DiffAttention`, not fused": "subtracts one softmax from another; fused, it makes two calls",
    "`HaloAttn`": "each block of queries has keys of its own",
    "`ConvAttention` of NextViT": "a grouped convolution",
    "`BilinearAttnTransform`": "products of pooled rows and columns",
    "`Attention` of TNT and VOLO, `ClassAttention`": "`unfold` or `fold` hides which axis has the tokens",
}
"""Classes of timm that are refused, and why."""
PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "families.md"


def render_page(results: list[dict[str, Any]]) -> str:
    """Return the page about all families, in Markdown."""
    import transformers

    results = sorted(results, key=lambda each: str(each["name"]).lower())
    built = [each for each in results if "unbuilt" not in each]
    attending = [each for each in built if each.get("fused", 0) + each.get("written", 0)]
    recorded = [each for each in attending if each.get("layers")]
    compared = [each for each in recorded if "error" in each and each["name"] not in DIFFERENT]
    rows = [f"| `{each['name']}` | {_way(each)} | {_verdict(each)} |" for each in built]
    unbuilt = ", ".join(f"`{each['name']}`" for each in results if "unbuilt" in each)
    lines = [
        "# Families of transformers and timm",
        "",
        *_wrap(f"This page lists what `watch` records of each model family of transformers {transformers.__version__}, "
               "and [of timm](#families-of-timm). A program makes it, which takes some minutes:"),
        "",
        "```sh",
        "python tests/support/family_survey.py --page",
        "```",
        "",
        *_wrap("Each model is small and has random weights. A spy that does not use headscope counts the fused "
               "attention calls, and the softmaxes that are multiplied with something. Then `watch` records a call. "
               "The outputs must be the same, to the bit. Where a model returns its own weights, the entropy of each "
               f"head must equal that of these weights, to {TOLERANCE:g} relative."),
        "",
        "| | families |",
        "|---|---|",
        f"| built and run | {len(built)} of {len(results)} |",
        f"| with attention, by the spy | {len(attending)} |",
        f"| recorded | {len(recorded)} |",
        f"| compared with their own weights | {len(compared)} |",
        "",
        "For a text model with images or sound, only the text was given in most cases.",
        "",
        "| family | attention, by the spy | `watch` |",
        "|---|---|---|",
        *rows,
        "",
        "## Not built",
        "",
        "These families need another library, or the program does not find sizes or inputs that fit:",
        "",
        *_wrap(f"{unbuilt}."),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def render_timm(results: list[dict[str, Any]], version: str) -> str:
    """Return the section about families of timm of a version, without its heading."""
    results = sorted(results, key=lambda each: (each.get("module", ""), each["name"]))
    built = [each for each in results if "on" in each]
    ways = [(each, (each["on"], each["off"])) for each in built]
    attending = [each for each, both in ways if any(_way(way) != "none" for way in both)]
    some = [each for each, both in ways if each in attending and all(way.get("layers") for way in both)]
    whole = [each for each, both in ways if each in some and not any("refused" in way for way in both)]
    equal = [each for each, both in ways if each in some and not any(way["unmatched"] for way in both)]
    rows = [
        f"| `{each['module']}` | `{each['name']}` | {_cell_of_timm(each['on'])} | {_cell_of_timm(each['off'])} |"
        for each in built
    ]
    unbuilt = ", ".join(f"`{each['name']}`" for each in results if "on" not in each)
    lines = [
        "",
        *_wrap(f"This section lists what `watch` records of timm {version}: models of each module with "
               "attention, and some of other modules. The same program makes it:"),
        "",
        "```sh",
        "python tests/support/family_survey.py --timm --page",
        "```",
        "",
        *_wrap("timm returns no weights. So the spy computes the entropies itself, in float64, from what goes into "
               "each softmax and each fused call. A layer is equal if each of its heads has one of these entropies, "
               f"to {timm_families.TOLERANCE:g} relative. Each model is tested twice: with timm's fused attention, and "
               "without it (`timm.layers.set_fused_attn`)."),
        "",
        "| | families |",
        "|---|---|",
        f"| built and run | {len(built)} of {len(results)} |",
        f"| with attention, by the spy | {len(attending)} |",
        f"| recorded, both ways | {len(some)} |",
        f"| recorded, both ways, without a layer that is refused | {len(whole)} |",
        f"| recorded layers equal to the spy's, both ways | {len(equal)} |",
        "",
        "| module | family | with fused attention | without |",
        "|---|---|---|---|",
        *rows,
        "",
        "These classes are refused:",
        "",
        "| class | reason |",
        "|---|---|",
        *(f"| {classes} | {reason} |" for classes, reason in REFUSED.items()),
        *(["", *_wrap(f"Not built: {unbuilt}.")] if unbuilt else []),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _cell_of_timm(result: dict[str, Any]) -> str:
    """Return what attends in a model of timm, and what is recorded of it."""
    layers = result.get("layers", 0)
    text = f"{layers} {'layer' if layers == 1 else 'layers'}"
    if result.get("unmatched"):
        text += f", **{len(result['unmatched'])} differ from the spy's**"
    elif layers:
        text += ", equal"
    if result.get("same") is False:
        text += "; **other outputs**"
    if "refused" in result or "crashed" in result:
        verdict = _verdict({key: result[key] for key in ("refused", "crashed") if key in result})
        text = f"{text}; {verdict}" if layers else verdict
    way = _way(result)
    return text if way == "none" else f"{way}: {text}"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def _way(result: dict[str, Any]) -> str:
    parts = [(result.get("fused", 0), "fused"), (result.get("written", 0), "by a softmax")]
    return ", ".join(f"{count} {how}" for count, how in parts if count) or "none"


def _verdict(result: dict[str, Any]) -> str:
    if "crashed" in result:
        return f"error: {result['crashed']}"
    if "refused" in result:
        reason = str(result["refused"]).removeprefix("watch: ")
        layers = re.findall(r"\((\w+)", reason)
        if "no attention call was observed" in reason:
            other = re.search(r"it has \S+ \((.*?)\)(, | and |$)", reason)
            return f"nothing to record{': ' + other[1] if other else ''}"
        if "could not be observed" in reason:
            return f"refused: not recognised in {', '.join(dict.fromkeys(layers))}"
        if "its output differs" in reason:
            return "refused: its output differs from that of its q, k, v and mask"
        return f"refused: {reason.rpartition(': ')[2]}"
    text = f"{result['layers']} layers" if result["layers"] > 1 else "1 layer"
    if not result["same"]:
        return f"{text}; **other outputs**"
    if result["name"] in DIFFERENT:
        return f"{text}; {DIFFERENT[result['name']]}"
    if result.get("unmatched"):
        return f"{text}; **{result['unmatched']} differ from its own weights**"
    if "error" not in result:
        return text
    is_equal = result["error"] <= TOLERANCE  # not if it is NaN
    return f"{text}, {'equal to' if is_equal else 'UNLIKE'} its own weights"


def main() -> int:
    """Survey families, and print a line of JSON for each; or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", help="of families, with commas; by default, all")
    parser.add_argument("--out", type=Path, help="append the lines to this file, and skip the families that it has")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}, from the lines of --out if it exists")
    parser.add_argument("--timm", action="store_true", help="survey timm; --page then writes the section about it")
    options = parser.parse_args()
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    every = list(timm_families.NAMES) if options.timm else list_names()
    names = options.names.split(",") if options.names else every
    if options.out and options.out.exists():
        done = {json.loads(line)["name"] for line in options.out.read_text().splitlines()}
        names = [name for name in names if name not in done]
    results: list[dict[str, Any]] = []
    if options.out and options.out.exists():
        results = [json.loads(line) for line in options.out.read_text().splitlines()]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, maxtasksperchild=40) as pool:
        for result in pool.imap_unordered(partial(_survey_in_time, of_timm=options.timm), names):
            line = json.dumps(result)
            results.append(result)
            print(line, flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(line + "\n")
    if options.page:
        old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        before, _, after = old.partition(f"{OF_TIMM}\n")
        page, section = (
            (before, render_timm(results, metadata.version("timm"))) if options.timm else (render_page(results), after)
        )
        PAGE.write_text(page.rstrip() + (f"\n\n{OF_TIMM}\n{section}" if section else "\n"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
