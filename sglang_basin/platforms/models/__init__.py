"""The model classes that the CPU profile loads at once, for `SGLANG_EXTERNAL_MODEL_PACKAGE`.

SGLang's scheduler otherwise imports all of its model files at each start (1,000 modules, 2 s, 70 MiB). It still does so
when asked for an architecture that is not here.
"""
