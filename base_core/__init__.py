"""BASE (arXiv 2609.36222) without a backend. Read routing, predictor, selection and budget in that order."""

from base_core.artifact import load_predictor, save_predictor
from base_core.budget import Budget, BudgetError, load_plan, save_plan
from base_core.predictor import Card, LayerPredictor, Predictor, PredictorError
from base_core.routing import RouterRule, Routing, route
from base_core.selection import Selection, removal_cost, select

__all__ = [
    "Budget",
    "BudgetError",
    "Card",
    "LayerPredictor",
    "Predictor",
    "PredictorError",
    "RouterRule",
    "Routing",
    "Selection",
    "load_plan",
    "load_predictor",
    "removal_cost",
    "route",
    "save_plan",
    "save_predictor",
    "select",
]
