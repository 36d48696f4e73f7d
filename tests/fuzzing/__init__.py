"""Random models, data and settings, and what each sum without noise must be: python -m tests.fuzzing."""
