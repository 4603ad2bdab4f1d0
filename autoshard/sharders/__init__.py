"""Sharders: from a problem and a cost model to a rank for every slice."""
