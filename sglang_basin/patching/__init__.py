"""Patches of SGLang for what no hook reaches, applied in memory as the patched module is imported.

`patches/` (in the wheel: `sglang_basin/patches/`) has the numbered diffs and their `series`. `patch` reads one and
applies it to a file's text, exactly or not at all; `series` reads them all and says how they stand to the installed
SGLang; `importer` puts them into force. Nothing is ever written into SGLang's folder.

With Basin off, nothing here is called by an engine. `python -m sglang_basin.patching` lists and checks.
"""
