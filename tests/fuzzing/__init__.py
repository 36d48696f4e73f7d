"""A generator of models, data and settings, and the checks that each un-noised sum must pass: python -m tests.fuzzing."""
