"""LightningMonitor and TorchtitanMonitor."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headscope import MultiHeadAttention, integrations, masks
from headscope.integrations import TorchtitanMonitor


class Logger:
    def __init__(self) -> None:
        self.logged: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.logged.setdefault(step, {}).update(metrics)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, mask=masks.causal())


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``lightning.pytorch``, or a module with its base class for callbacks if it is not installed."""
    module: Any
    try:
        module = importlib.import_module("lightning.pytorch")
    except ImportError:
        module = ModuleType("lightning.pytorch")
        module.Callback = type("Callback", (), {})
        monkeypatch.setitem(sys.modules, "lightning.pytorch", module)
        monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    monkeypatch.delitem(sys.modules, "headscope.integrations._lightning", raising=False)
    monkeypatch.delitem(vars(integrations), "LightningMonitor", raising=False)
    yield module
    vars(integrations).pop("LightningMonitor", None)


def fit(module: nn.Module, monitor: Any, batches: int, accumulate: int = 1, zero: bool = True) -> Logger:
    """Call the hooks in the order of Lightning's loop."""
    logger, x = Logger(), torch.randn(2, 9, 16)
    trainer = SimpleNamespace(global_step=0, loggers=[logger], is_global_zero=zero)
    monitor.on_train_start(trainer, module)
    for batch in range(batches):
        monitor.on_train_batch_start(trainer, module, x, batch)
        module(x).sum().backward()
        trainer.global_step += (batch + 1) % accumulate == 0
        monitor.on_train_batch_end(trainer, module, None, x, batch)
        module(x)  # a validation
    monitor.on_train_end(trainer, module)
    return logger


@pytest.mark.usefixtures("lightning")
def test_lightning_gets_one_batch_of_each_step_that_is_due() -> None:
    monitor = integrations.LightningMonitor(every=2, rows=3)
    logger = fit(Model(), monitor, 10, accumulate=2)
    assert sorted(logger.logged) == [0, 2, 4]
    assert "attn/L00/H01/entropy" in logger.logged[4]
    assert monitor.recording.stats.parts["attention"].looked_at == 3 * 2 * 3
    assert fit(Model(), integrations.LightningMonitor(), 2, zero=False).logged == {}


@pytest.mark.usefixtures("lightning")
def test_lightning_ends_the_watch_after_an_exception() -> None:
    monitor, module, original = integrations.LightningMonitor(), Model(), nn.Module.__call__
    trainer = SimpleNamespace(global_step=0, loggers=[], is_global_zero=True)
    monitor.on_train_start(trainer, module)
    monitor.on_train_batch_start(trainer, module, None, 0)
    assert type(module).__call__ is not original
    monitor.on_exception(trainer, module, KeyError())
    assert type(module).__call__ is original


@pytest.mark.filterwarnings("ignore:::lightning")
def test_lightnings_trainer_logs_the_values() -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")

    class Own(Model, lightning.LightningModule):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Log(lightning.loggers.logger.DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.logged: dict[int, dict[str, float]] = {}

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.logged.setdefault(step, {}).update(metrics)

    log, monitor = Log(), integrations.LightningMonitor(every=3)
    trainer = lightning.Trainer(
        max_steps=7, log_every_n_steps=1, accelerator="cpu", logger=log, callbacks=[monitor],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Own(), torch.utils.data.DataLoader(torch.randn(14, 9, 16), batch_size=2))
    assert sorted(step for step, values in log.logged.items() if "attn/alarms" in values) == [0, 3, 6]
    assert monitor.recording.layers == ("attention",)


class Processor:
    """What TorchtitanMonitor uses of torchtitan 0.3's ``MetricsProcessor``, with the same signatures."""

    def __init__(self, model: nn.Module) -> None:
        self.model_parts = [model]
        self.logged: dict[int, dict[str, float]] = {}
        self.closed = False

    def should_log(self, step: int) -> bool:
        return step == 1 or step % 3 == 0

    def log(
        self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.logged[step] = {"loss": global_avg_loss, **(extra_metrics or {})}

    def close(self) -> None:
        self.closed = True


def test_torchtitan_gets_the_values_with_the_metrics_of_the_step() -> None:
    model = Model()
    processor, x = Processor(model), torch.randn(2, 9, 16)
    monitor = TorchtitanMonitor(processor, rows=3)
    for step in range(1, 8):
        logs = processor.should_log(step)
        model(x).sum().backward()
        if logs:
            processor.log(step, 0.5, 0.5, 1.0, extra_metrics={"lr": 0.1})
    processor.close()
    assert processor.closed
    assert sorted(processor.logged) == [1, 3, 6]
    assert {"loss", "lr", "attn/alarms", "attn/L00/H01/first"} <= set(processor.logged[3])
    assert monitor.recording.forwards == 3
    assert type(model).__call__ is nn.Module.__call__
    with pytest.raises(TypeError, match="metrics_processor"):
        TorchtitanMonitor(object())


@pytest.mark.parametrize(("name", "package"), [("LightningMonitor", "lightning"), ("TrainerMonitor", "transformers")])
def test_a_missing_package_is_named_with_what_to_install(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = f"headscope.integrations.{integrations._HOME[name]}"
    monkeypatch.delitem(sys.modules, home, raising=False)
    monkeypatch.delitem(vars(integrations), name, raising=False)
    for each in [each for each in sys.modules if each.split(".")[0] in (package, "pytorch_lightning")]:
        monkeypatch.delitem(sys.modules, each)
    for each in (package, "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, each, None)
    with pytest.raises(ImportError, match=f"^{name}: the package {package} is missing; pip install"):
        getattr(integrations, name)


def test_importing_the_package_loads_no_trainer() -> None:
    assert set(integrations.__all__) <= set(dir(integrations))
    with pytest.raises(AttributeError, match="Other"):
        integrations.Other  # noqa: B018
