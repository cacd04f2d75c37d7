"""Exact statistics of every head over a corpus, computed by any number of processes and the same to the bit."""

from headscope.survey._corpus import SurveyError
from headscope.survey._merge import load_result as load_result
from headscope.survey._page import render_comparison as render_comparison
from headscope.survey._page import render_page as render_page
from headscope.survey._run import Progress, survey, survey_digest
from headscope.survey._subject import Subject as Subject

__all__ = ["Progress", "SurveyError", "survey", "survey_digest"]

for _class in (Progress, SurveyError):
    _class.__module__ = "headscope.survey"  # their public path
