"""Who is measured, and the environment each runs in: its pins are in benchmarks/requirements/."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1]
REQUIREMENTS = BENCHMARKS / "requirements"
ENVIRONMENTS = BENCHMARKS / ".envs"
INSTALLED = "installed.txt"  # in each environment: the requirements it was made from
OURS, BASE = "headscope", "torch"


@dataclass(frozen=True, slots=True)
class Peer:
    """One competitor.

    Attributes:
        name: as ``--peers`` takes it and the worker knows it.
        title: of its column.
        environment: a file of requirements/ without its suffix; None: the environment that runs this benchmark.
    """

    name: str
    title: str
    environment: str | None


PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, "headscope", None),
        Peer(BASE, "torch SDPA", "torch"),
        Peer("plain", "bmm–softmax–bmm", "torch"),
        Peer("flex", "flex", "torch"),
        Peer("zentorch", "zentorch", "zentorch"),
        Peer("onnxruntime", "ONNX Runtime", "onnxruntime"),
        Peer("openvino", "OpenVINO", "openvino"),
    )
}


def python(peer: Peer) -> Path:
    """The interpreter a peer runs in."""
    if peer.environment is None:
        return Path(sys.executable)
    return ENVIRONMENTS / peer.environment / "bin" / "python"


def missing(peer: Peer) -> str | None:
    """Why a peer cannot be started, or None."""
    if peer.environment is None:
        return None
    pinned = REQUIREMENTS / f"{peer.environment}.txt"
    installed = ENVIRONMENTS / peer.environment / INSTALLED
    if not installed.exists() or not python(peer).exists():
        return f"its environment is not there: python benchmarks/attention.py --setup {peer.environment}"
    if installed.read_text() != pinned.read_text():
        return f"its environment has other versions: python benchmarks/attention.py --setup {peer.environment}"
    return None


def environments() -> list[str]:
    """All that can be made."""
    return list(dict.fromkeys(peer.environment for peer in PEERS.values() if peer.environment is not None))


def make(environment: str) -> None:
    """Make one environment anew from its requirements.

    Raises:
        subprocess.CalledProcessError: pip could not install them; it has printed why.
    """
    place, pinned = ENVIRONMENTS / environment, REQUIREMENTS / f"{environment}.txt"
    if place.exists():
        shutil.rmtree(place)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    pip = [place / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", pinned], check=True)
    (place / INSTALLED).write_text(pinned.read_text())  # last: what is half made is not there
