"""Basin: keeps an agent-serving SGLang cluster out of its metastable failure.

Where to read on: `policy` decides, `engine` puts the decisions into SGLang, `platforms` runs SGLang
without a GPU, `replay` drives recorded agent sessions against a live stack.
"""

__version__ = "0.1.0"

SGLANG_VERSION = "0.5.23"
"""The one SGLang version whose internals the hooks are written against."""
