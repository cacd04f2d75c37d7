"""A warning for exports to ONNX that lack the translations of headscope's operators.

torch.onnx.export fails on an operator without a translation with "No ONNX function found for <OpOverload(...)>", which
does not name the remedy. The fake kernels of the operators run earlier in the export, so they give this warning.
"""

from __future__ import annotations

import warnings

import torch

__all__ = ["mark_translated", "warn_if_untranslated"]

_MESSAGE = (
    "torch.onnx.export: headscope's operators require a translation; "
    "expected custom_translation_table=headscope.onnx.translations() and opset_version=23 or higher"
)

_translated = False


def mark_translated() -> None:
    """Record that the translations were requested, after which exports are not warned of."""
    global _translated
    _translated = True


def warn_if_untranslated() -> None:
    """Warn if a model is being exported to ONNX and nobody has requested the translations."""
    if not _translated and torch.onnx.is_in_onnx_export():
        warnings.warn(_MESSAGE, UserWarning, stacklevel=2)
