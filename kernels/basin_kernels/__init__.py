"""GPU kernels of Basin, written in Triton. `page_copy` moves KV pages, `heads` says which heads go where.

Each kernel is one file with its launcher (shapes and dtypes), its Triton function and its torch reference. Imports
torch and Triton, neither sglang nor sglang_basin.
"""
