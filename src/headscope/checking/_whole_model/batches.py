"""Questions about the size of a batch and the place in it: up to rounding, and to the bit."""

from __future__ import annotations

from headscope._support.user_line import describe_error
from headscope.checking._copies import CODE_ERRORS
from headscope.checking._whole_model.case import ModelCase
from headscope.checking._whole_model.inputs import join, vary

QUESTION = "batch size and place"


def ask_batches(case: ModelCase) -> None:
    """Ask whether an entry gives the same output alone and at each place of a batch of three."""
    if case.unusable:
        case.not_tested[QUESTION] = case.unusable
        return
    others = [vary(case.entry, seed) for seed in (1, 2)]
    for place in range(3):
        batch = join([*others[:place], case.entry, *others[place:]])
        try:
            out = case.subject.run(batch)
        except CODE_ERRORS as error:
            case.not_tested[QUESTION] = f"a batch of three: {describe_error(error)}"
            return
        if out.shape[0] != 3:  # such as a model that joins the patches of all images to one row
            case.not_tested[QUESTION] = (
                f"a batch of three has an output {list(out.shape)}: its first axis is not the batch"
            )
            return
        if out.shape[1:] != case.out.shape[1:]:  # such as masks of objects, of which each batch has another number
            case.not_tested[QUESTION] = f"the output of one entry is {list(case.out.shape)}, of three {list(out.shape)}"
            return
        off = case.gap(case.out, out[place : place + 1])
        if off > case.subject.tolerance:
            evidence = f"entry {place} of a batch of three differs from the same entry alone {case.measured(off)}"
            case.report("batch-changes-output", evidence)
            return
    _ask_bits(case)


def _ask_bits(case: ModelCase) -> None:
    """Measure the difference in the model's own dtype, which is rounding; report it if bits must be the same."""
    subject = case.own
    if subject is None:
        case.not_tested["bits in batches"] = "the model does not run on the CPU in its own dtype"
        return
    words = str(subject.dtype).removeprefix("torch.")
    others = [vary(case.entry, seed) for seed in (1, 2)]
    try:
        alone = subject.run(case.entry)
        places = [
            subject.run(join([*others[:place], case.entry, *others[place:]]))[place : place + 1] for place in range(3)
        ]
    except CODE_ERRORS as error:
        case.not_tested["bits in batches"] = f"in {words}: {describe_error(error)}"
        return
    size, place = (max(case.gap(one, other) for one in places) for other in (alone, places[0]))
    for name, off, what in (("batch-variant", size, "size of the batch"), ("place-variant", place, "place in it")):
        result = f"up to {off:.2g}" if off else "equal to the bit"
        case.understood.append(f"in {words}, whatever the {what}: {result}")
        if off and case.options.reproducible:
            case.report(name, f"in {words}, outputs differ by up to {off:.2g} with the {what}")
