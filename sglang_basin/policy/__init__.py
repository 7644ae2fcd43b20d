"""The decisions, without an engine: pure Python, the standard library only, time as an argument.

The engine (`sglang_basin.engine.gate`) and the simulator drive the very same objects. Read in this order:
`decisions` (what a policy answers), `reservation` (what a session counts for), `sessions` (who is live),
`door` (who enters when).
"""
