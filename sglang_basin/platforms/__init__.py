"""Where SGLang runs: what each platform needs of it, and the reference CPU platform.

`profiles` says what flags and variables a server gets; it imports neither sglang nor torch, so launchers read it
without paying for an engine. `cpu` is loaded by SGLang through its entry points, with `attention` as its one
substantial change. `tiny_model` builds the models that a CPU can serve.
"""
