"""The strategies, one idea per file. `planning/__init__.py` lists them by name."""
