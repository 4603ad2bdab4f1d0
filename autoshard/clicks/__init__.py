"""Click data sets: samples with a label, numeric features and bags of ids, for training."""
