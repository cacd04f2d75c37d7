"""The data of the viewer page."""
