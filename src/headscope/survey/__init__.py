"""Exact statistics of every head over a corpus, computed by any number of processes and the same to the bit."""

from headscope.survey._corpus import SurveyError
from headscope.survey._run import Progress, survey, survey_digest
from headscope.survey._subject import Subject

__all__ = ["Progress", "Subject", "SurveyError", "survey", "survey_digest"]

for _class in (Progress, Subject, SurveyError):
    _class.__module__ = "headscope.survey"  # their public path
