"""The entry point that SGLang calls in each of its processes (`sglang.srt.plugins`).

Basin is on exactly when a launcher, or the user, left a configuration in the environment; otherwise nothing is
imported from the rest of the package and no hook is registered.
"""

from __future__ import annotations

import os

from sglang_basin.config import ENVIRONMENT_VARIABLE, BasinConfig, ConfigError


def register() -> None:
    """Register the hooks, or stop the process with a list of what does not fit.

    SystemExit on purpose: SGLang logs and forgets every Exception that a plugin raises, and would then serve
    without the protection the user asked for.
    """
    if not os.environ.get(ENVIRONMENT_VARIABLE):
        return
    try:
        config = BasinConfig.from_environment(os.environ)
    except ConfigError as error:
        raise SystemExit(f"Basin: {error}") from None

    from sglang_basin.engine import hooks
    from sglang_basin.patching import importer
    from sglang_basin.patching.patch import PatchError

    try:
        importer.activate()
    except PatchError as error:
        raise SystemExit(f"Basin: {error}") from None
    wanted = hooks.needed(config or BasinConfig())
    if wrong := hooks.mismatches(wanted):
        raise SystemExit(stop_message(wrong))
    hooks.register(wanted)


def stop_message(wrong: list) -> str:
    """The text that Basin stops with when it cannot hook into this SGLang."""
    listed = "\n".join(f"  - {mismatch}" for mismatch in wrong)
    return f"Basin cannot hook into this SGLang and stops; `python -m sglang_basin.doctor` checks all of it:\n{listed}"
