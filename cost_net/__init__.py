"""The neural cost model: data sets, networks, training, error reports."""
