"""Where SGLang runs: what each platform needs (`profiles`), and the reference CPU platform itself (`cpu`).

`profiles` and `corpus` import neither sglang nor torch, so launchers read them without paying for an engine. `cpu`
is loaded by SGLang through its entry points, `tiny_model` builds the models that a CPU can serve.
"""
