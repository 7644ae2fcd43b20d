"""Lending: decode keeps finished calls' KV in memory it does not need, prefill gets back what its own cache lost.

No directory and no message of its own: decode's radix cache keeps the pages (`keep`), the metadata message that decode
sends for every call carries where the call's prefix lies there (`pages`), and prefill's scheduler (`borrower`) has a
thread (`pull`) read what its cache lacks, layer by layer (`transport`), into slots of its own. `worth` and `breaker`
decide, and are pure. `prefill` and `decode` are the hooks' own code; the table of hooks is `engine.hooks`.
"""
