"""One SGLang server with Basin in it: `python -m sglang_basin.launch_server --disagg-mode prefill --basin-… …`

Every flag but `--basin-*` is SGLang's and passes through. Without a Basin flag this is what `python -m
sglang.launch_server` does: nothing is set and no hook is registered. With one, the configuration travels in an
environment variable, because SGLang's scheduler is another process that loads Basin's plugin by itself.

SGLang starts its subprocesses by `spawn`, which imports this module again before anything of SGLang's: the last lines
put Basin's patches into force there. Keep its top level free of other effects.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from sglang_basin import SGLANG_VERSION
from sglang_basin.config import ENVIRONMENT_VARIABLE, BasinConfig, ConfigError, flag_parser, split_flags
from sglang_basin.engine import flags
from sglang_basin.patching import importer
from sglang_basin.patching.patch import PatchError

HELP = """
Any --basin-* flag turns Basin on; with none, SGLang runs as it is. --disagg-mode is short for --disaggregation-mode.

Every other flag is SGLang's. To see them: python -m sglang.launch_server --help
"""


def main(argv: Sequence[str]) -> int:
    if "-h" in argv or "--help" in argv:
        argparse.ArgumentParser(
            prog="python -m sglang_basin.launch_server",
            usage="%(prog)s --disagg-mode {prefill,decode} [--basin-* ...] [any SGLang flag]",
            parents=[flag_parser()],
            epilog=HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        ).print_help()
        return 0
    try:
        config, others = split_flags(argv)
        arguments = flags.expand_alias(others)
        # A parent launcher, systemd or Kubernetes may have set the configuration already; flags beat it.
        if config is None:
            config = BasinConfig.from_environment(os.environ)
        if config is not None:
            refuse_other_version()
            arguments = _turn_on(config, arguments)
        return _run(config, arguments)
    except ConfigError as error:
        print(f"launch_server: {error}", file=sys.stderr)
        return 2


def refuse_other_version() -> None:
    """Raise ConfigError unless the installed SGLang is the one the hooks are written against. Does not import it."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "none"
    if found != SGLANG_VERSION:
        raise ConfigError(
            f"Basin's hooks are written against sglang {SGLANG_VERSION}, found {found}; "
            f"run: pip install sglang=={SGLANG_VERSION}"
        )


def _turn_on(config: BasinConfig, arguments: list[str]) -> list[str]:
    """Export the configuration and what SGLang needs for it, saying why; returns SGLang's arguments."""
    settings = flags.prepare(config, arguments, os.environ)
    os.environ[ENVIRONMENT_VARIABLE] = config.to_json()
    os.environ.update(settings.environment)
    for note in settings.notes:
        print(f"basin: set {note}", flush=True)
    try:
        importer.activate()
    except PatchError as error:
        raise ConfigError(str(error)) from None
    return settings.arguments


def _refuse_missing_hooks(config: BasinConfig) -> None:
    """Raise ConfigError with the list of hooks that SGLang did not apply: it only logs such failures."""
    from sglang_basin.engine import hooks, plugin

    if missing := hooks.unapplied(hooks.needed(config)):
        raise ConfigError(plugin.stop_message(missing))


def _run(config: BasinConfig | None, arguments: list[str]) -> int:
    """SGLang's own start, in its own order (`sglang/launch_server.py`)."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if config is not None:
        _refuse_missing_hooks(config)
    server_args = prepare_server_args(arguments)
    if config is not None:
        flags.check_record(config, server_args)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
if __name__ == "__mp_main__" and os.environ.get(ENVIRONMENT_VARIABLE):
    importer.activate()
