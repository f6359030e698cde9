"""Choosing codes, scales and formats by what they do to the model: calibration, compensation, budgets."""
