"""Predicting the longest context that a session will reach.

Reading order: `features` and `text` (what is known of a session), `forest` (numbers to a mean and a spread), `online`
(what finished sessions teach: tasks seen before, calibration under drift), `model` (the parts together), `seen` and
`predictor` (the policy's `PeakPredictor`, without and with a model), `payload` and `deployed` (what an engine uses of
it), `training`, `model_file`; then `recorded` and `session_log` (what it learns from), `baseline` and `alternatives`
(what it is compared with), `evaluate` and `report`.

All models work on logarithms: the target is log(peak / present context), which is never negative.
"""
