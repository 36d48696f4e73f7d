"""What does each tier cost, and what does it get? No data and no torch needed."""

import epsilons

# 60,000 people: 34 % asked for epsilon 1, 43 % for 2, 23 % for 3.
budgets = epsilons.Budgets.from_shares({1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, records=60_000, delta=1e-5)
recipe = epsilons.Recipe(steps=9_375, batch_size=512, clip_norm=0.2)

plans = {
    strategy: epsilons.plan(budgets, recipe, strategy=strategy, accountant="rdp")
    for strategy in ("uniform", "scale", "sample")
}

print(plans["scale"].summary())
print()
print(plans["uniform"].compare(plans["scale"], plans["sample"]))

# No plan exceeds a budget, and individual plans use them up.
for strategy, plan in plans.items():
    assert (plan.epsilon_spent() <= budgets.epsilons).all(), strategy
assert (plans["scale"].epsilon_spent() > 0.9999 * budgets.epsilons).all()
