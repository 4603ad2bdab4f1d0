"""Training a model under a plan: DLRM, metrics, the trainer, and checkpoints."""
