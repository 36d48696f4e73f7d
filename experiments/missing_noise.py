"""What membership inference says about missing noise: the arm Sample of lira_digits with a part of the noise.

    python experiments/missing_noise.py [--shadows 128] [--factors 1,0.5,0.1,0.01]

Prints the AUC of each group, and the largest share of the certified advantage that the attack reaches. The attack never
exceeds the certified curve, although the plan's promise does not hold with less noise: it is no audit.
"""

from __future__ import annotations

import argparse

from epsilons.auditing.membership import ATTACKS
from epsilons.auditing.membership.analysis import analyse
from epsilons.auditing.membership.shadows import train_shadows
from experiments.audit_power import planted
from experiments.membership import shadow_setting
from experiments.settings import MembershipSettings, tables
from experiments.training import budgets_of

ATTACK = "lira-shrunk"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shadows", type=int, default=128)
    parser.add_argument("--factors", default="1,0.5,0.1,0.01")
    arguments = parser.parse_args()
    settings = tables()["lira_digits"].by_name["sample"].settings
    assert isinstance(settings, MembershipSettings)
    dealt = budgets_of(settings, settings.pool, seed=0)
    setting = shadow_setting(settings, dealt, seed=0, device="cpu")
    for factor in arguments.factors.split(","):
        with planted(f"noise={factor}", setting.plan, 0):
            signals = train_shadows(setting, arguments.shadows, jobs=1).signals
        result = analyse(signals, {ATTACK: ATTACKS[ATTACK](signals)}, setting.plan, dealt.group, dealt_at_random=True)
        for row, group in enumerate(result.groups):
            one = result.of(ATTACK, row)
            above = "above the certified curve" if one.exceeds_certified else "below the certified curve"
            print(
                f"noise × {factor}: ε = {group.label}: AUC {one.auc}, share {one.share_of_certified:.2f}, {above}",
                flush=True,
            )


if __name__ == "__main__":
    main()
