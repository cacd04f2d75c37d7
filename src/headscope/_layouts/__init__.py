"""Layouts of other modules' weights, as data, and the conversions between them and headscope's."""

from headscope._layouts.convert import convert_module, convert_state, export_state
from headscope._layouts.state import State
from headscope._layouts.table import LAYOUTS

__all__ = ["LAYOUTS", "State", "convert_module", "convert_state", "export_state"]
