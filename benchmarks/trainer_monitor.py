"""What TrainerMonitor costs in a training of transformers: CPU time of the steps that it looks at, and of all others.

    python benchmarks/trainer_monitor.py --steps 200 --every 10 --rows 64 [--compile]

The steps of one training are interleaved by themselves: one of ``every`` is looked at. The cost is the difference of
their median CPU time and that of the others, over the time of ``every`` steps. A second training, without a monitor,
gives the time of the others for comparison. Needs transformers, accelerate and tensorboard.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from headscope.integrations import TrainerMonitor
from headscope.watching import register_transformers

SKIPPED = 12  # steps at the start, in which things are compiled and caches fill


class Clock:
    """The CPU time of each step."""

    def __init__(self) -> None:
        self.times: dict[int, float] = {}
        self.began = 0.0


class Begin(TrainerCallback):
    """Starts the clock; it is called before the monitor."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.clock.began = time.process_time()


class End(TrainerCallback):
    """Stops the clock; it is called after the monitor."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.times[state.global_step] = time.process_time() - self.clock.began


def train(options: argparse.Namespace, folder: str, *, monitored: bool) -> dict[int, float]:
    """Train a Llama of 4 layers on the bytes of a source file; return the CPU time of each step."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(torch.__file__).read_bytes()))
    starts = torch.randint(0, len(text) - options.length, (options.steps * options.batch,)).tolist()
    data = [dict.fromkeys(("input_ids", "labels"), text[at : at + options.length]) for at in starts]
    sizes: dict[str, Any] = {
        "vocab_size": 256, "hidden_size": options.width, "intermediate_size": 4 * options.width,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    }  # fmt: skip
    config = LlamaConfig(**{**sizes, "attn_implementation": options.attention})
    clock, monitor = Clock(), TrainerMonitor(every=options.every, rows=options.rows)
    arguments = TrainingArguments(
        output_dir=folder, max_steps=options.steps, per_device_train_batch_size=options.batch, logging_steps=10,
        report_to=["tensorboard"], use_cpu=True, learning_rate=1e-3, warmup_steps=20, save_strategy="no",
        disable_tqdm=True, torch_compile=options.compile,
        torch_compile_backend=options.backend if options.compile else None,
    )  # fmt: skip
    callbacks = [Begin(clock), *([monitor] if monitored else []), End(clock)]
    Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data, callbacks=callbacks).train()
    return {step: seconds for step, seconds in clock.times.items() if step > SKIPPED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 200), ("every", 10), ("rows", 64), ("batch", 8), ("length", 256), ("width", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--attention", default="sdpa", help="attn_implementation; --compile requires headscope")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", default=tempfile.mkdtemp(), help="the folder of the event files")
    options = parser.parse_args()
    register_transformers()
    plain = train(options, f"{options.out}/without", monitored=False)
    times = train(options, f"{options.out}/with", monitored=True)
    seen = statistics.median(each for step, each in times.items() if step % options.every == 0)
    others = statistics.median(each for step, each in times.items() if step % options.every)
    print(json.dumps({
        "machine": platform.processor() or platform.machine(), "threads": torch.get_num_threads(),
        "options": vars(options), "seconds of a step without a monitor": statistics.median(plain.values()),
        "seconds of a step not looked at": others, "seconds of a step looked at": seen,
        "cost of the monitor": (seen - others) / options.every / others,
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
