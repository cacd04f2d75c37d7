"""Classes that are re-exported name their public path, so that reprs, pickles and the reference show it."""

import importlib
import inspect

import pytest

PACKAGES = (
    "masks", "positions", "cache", "module", "stats", "layouts", "nn_compat", "heads", "watching", "tracing",
    "checking", "decisions", "comparing", "examples", "report", "survey",
)  # fmt: skip
BY_SOURCE = {"MultiHeadAttention"}
"""Those that name the file they are defined in. For a class, ``inspect.getsource`` and ``??`` look there and nowhere
else, and this one is what people open first."""


@pytest.mark.parametrize("package", PACKAGES)
def test_classes_name_their_public_path(package: str) -> None:
    module = importlib.import_module(f"headscope.{package}")
    classes = [value for name in module.__all__ if inspect.isclass(value := getattr(module, name))]

    private = {value.__name__ for value in classes if "._" in value.__module__}

    assert private <= BY_SOURCE


def test_the_source_of_the_module_is_found() -> None:
    from headscope import MultiHeadAttention

    assert inspect.getsource(MultiHeadAttention).startswith("class MultiHeadAttention(")


def test_public_paths_lead_to_the_class() -> None:
    for package in PACKAGES:
        module = importlib.import_module(f"headscope.{package}")
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) and value.__module__.startswith("headscope."):
                assert getattr(importlib.import_module(value.__module__), value.__name__) is value
