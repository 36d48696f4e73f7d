"""The keys of a config file: a hook of mkdocs adds them to config.md."""

from typing import Any

from epsilons.configs.config import config_keys


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with every page."""
    return markdown + config_keys() if page.file.src_uri == "config.md" else markdown
