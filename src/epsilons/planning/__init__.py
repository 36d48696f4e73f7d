"""Budgets + Recipe -> Plan. Nothing here needs torch.

A strategy is a function (budgets, recipe, accountant, **options) -> Plan: one file in strategies/, and one line in the
table there. Callers may pass such a function of their own. In any case the epsilon that each group spends is computed
here before a plan is returned.
"""

from __future__ import annotations

from .advice import Advice, advise
from .class_balance import balance
from .plan_numbers import Phase, Recipe
from .planner import plan
from .plans import Plan
from .risk_profile import GroupRisk, risk
from .strategies import STRATEGIES, Strategy

__all__ = [
    "STRATEGIES",
    "Advice",
    "GroupRisk",
    "Phase",
    "Plan",
    "Recipe",
    "Strategy",
    "advise",
    "balance",
    "plan",
    "risk",
]
