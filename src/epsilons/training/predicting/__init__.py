"""Predictions by a trained model, from a run's folder or a release folder.

epsilons.Run.load("runs/first").predict("new.csv").labels
epsilons.Predictor.load("release").predict(table).probabilities
"""

from __future__ import annotations

from .predictor import Predictions, Predictor

__all__ = ["Predictions", "Predictor"]
