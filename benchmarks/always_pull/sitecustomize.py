"""On the PYTHONPATH of a node's engines: lent KV is read whatever that takes, so that a small CPU model reads much."""

from sglang_basin.lending import worth

worth.READ_MAY_TAKE = float("inf")
