"""What headscope shows of a forward pass: a sheet of figures, and its forms as page, terminal output and plots."""

from headscope.report.page import SaveError, render, save
from headscope.report.sheet import NOT_EXPLANATION, Sheet, image_sheet, text_sheet

__all__ = ["NOT_EXPLANATION", "SaveError", "Sheet", "image_sheet", "render", "save", "text_sheet"]
