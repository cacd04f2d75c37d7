"""Make the text model's data: the Python standard library and its documentation, split, tokenised.

Writes into ``--out`` (default ``training/data``):

- ``tokenizer.json``: byte-level BPE, trained on the training files only;
- ``train.npy``, ``heldout.npy``: token ids, uint16, the files one after another;
- ``manifest.json``: every file with its split, size and SHA-256, and the version of Python.

and, with ``--sample FILE``, the held-out text that ships with the tests.

A file is held out by a hash of its topic, which is its name without suffix and without "test_", "_" or "lib": so
``argparse.py`` and ``argparse.rst.txt``, which share whole sentences, always fall on the same side.
``pydoc_data/topics.py`` stays out: it is generated from the reST pages, held-out ones included.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
DOCS = Path("/usr/share/doc/python3.11/html/_sources")  # where Debian's package python3.11-doc puts the reST pages
VOCAB_SIZE = 2048
HELDOUT_OF_1000 = 50
SAMPLE_BYTES = 80_000
SAMPLE_EXCERPT = 4_000

# Not prose and not code that a person would write: tests, generated tables, generated pages.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "encodings", "pydoc_data", "_bundled"}
SKIPPED_FILES = {"html/entities.py", "_sysconfigdata", "lib2to3/pgen2/grammar", "config-3."}

# As GPT-2 splits words, but digits one by one, so that a number is always spelled the same way; line breaks and
# indentation stay whole.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]{1,8}|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Source:
    """One file of the corpus: its name in the manifest, its text and whether it is held out."""

    name: str
    text: str
    heldout: bool


def topic(name: str) -> str:
    """Return what a file is about: the stem that code and documentation share."""
    stem = Path(name).name.split(".")[0].lower()
    if stem in {"__init__", "__main__", "index"}:
        stem = Path(name).parent.name.lower()
    return stem.removeprefix("test_").lstrip("_").removeprefix("lib")


def is_heldout(name: str) -> bool:
    """Return whether the file belongs to the held-out part, by a hash of its topic."""
    digest = hashlib.sha256(topic(name).encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELDOUT_OF_1000


def collect(library: Path, docs: Path) -> list[Source]:
    """Read the corpus in a fixed order: code by path, then documentation by path."""
    paths = [("Lib", library, path) for path in library.rglob("*.py")]
    paths += [("Doc", docs, path) for path in docs.rglob("*.rst.txt")]
    sources: list[Source] = []
    for label, root, path in sorted(paths, key=lambda entry: (entry[0], entry[2].relative_to(entry[1]).as_posix())):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts[:-1]):
            continue
        if any(relative.as_posix().startswith(start) for start in SKIPPED_FILES):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.strip():
            name = f"{label}/{relative.as_posix()}"
            sources.append(Source(name, text, is_heldout(name)))
    return sources


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer: every byte is a token, so every text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def heldout_sample(sources: list[Source], size: int, excerpt: int) -> str:
    """Return about `size` bytes of held-out text: one excerpt of whole lines from each file, in the order of a hash."""
    chosen: list[str] = []
    total = 0
    held = [source for source in sources if source.heldout]
    for source in sorted(held, key=lambda source: hashlib.sha256(source.name.encode()).digest()):
        lines = source.text.splitlines(keepends=True)
        first = hashlib.sha256(source.name.encode()).digest()[-1] * max(0, len(lines) - 60) // 256
        part = ""
        for line in lines[first:]:
            if len((part + line).encode()) > excerpt:
                break
            part += line
        if total + len(part.encode()) > size:
            break
        chosen.append(part)
        total += len(part.encode())
    return "".join(chosen)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def main() -> int:
    """Prepare the data; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "data", help="folder for the data")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the documentation's *.rst.txt pages")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--sample", type=Path, help="also write the held-out sample for the tests to this file")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    if not arguments.docs.is_dir():
        console.print(
            f"no documentation in {arguments.docs}: install the Debian package python3.11-doc, or name --docs"
        )
        return 2

    sources = collect(Path(sysconfig.get_paths()["stdlib"]), arguments.docs)
    train = [source for source in sources if not source.heldout]
    console.print(f"{len(sources)} files, {len(sources) - len(train)} held out")
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([source.text for source in train], arguments.vocab_size)
    write_atomically(arguments.out / "tokenizer.json", tokenizer.to_str().encode())

    counts = {}
    for split in ("train", "heldout"):
        texts = [source.text for source in sources if source.heldout == (split == "heldout")]
        ids = [np.asarray(tokenizer.encode(text).ids, dtype=np.uint16) for text in track(texts, split, console=console)]
        stream = np.concatenate(ids)
        np.save(arguments.out / f"{split}.npy", stream)
        size = sum(len(text.encode()) for text in texts)
        counts[split] = {"files": len(texts), "bytes": size, "tokens": int(stream.size)}
        console.print(f"{split}: {size:,} bytes, {stream.size:,} tokens, {size / stream.size:.3f} bytes per token")

    manifest = {
        "python": platform.python_version(),
        "tokenizer": {"vocab_size": tokenizer.get_vocab_size()},
        "splits": counts,
        "files": [
            {
                "name": source.name,
                "heldout": source.heldout,
                "bytes": len(source.text.encode()),
                "sha256": hashlib.sha256(source.text.encode()).hexdigest(),
            }
            for source in sources
        ],
    }
    write_atomically(arguments.out / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
    if arguments.sample is not None:
        write_atomically(arguments.sample, heldout_sample(sources, SAMPLE_BYTES, SAMPLE_EXCERPT).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
