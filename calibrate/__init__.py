"""Calibration, evaluation and the command line: everything that stands on top of the backends."""
