"""Gated delta nets whose keys are as wide as their values: llama.cpp knows no others in `qwen35`.

Zeros make queries and keys wider. They are scaled by the root of their width: the norm that follows takes the factor away, but not from its
epsilon. So a widened target is held to the same target widened.
"""
import numpy


def with_wide_keys(rows, heads, key, value):
    """Rows of queries, keys and values, those of the first two with zeros up to `value` rows a head."""
    rest = rows.shape[1:]
    wide = numpy.zeros((2 * heads, value, *rest), rows.dtype)
    wide[:, :key] = rows[: 2 * heads * key].reshape(2 * heads, key, *rest)
    return numpy.concatenate([wide.reshape(-1, *rest), rows[2 * heads * key :]])
