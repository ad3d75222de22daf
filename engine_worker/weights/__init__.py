"""Which tensors a checkpoint holds, and which of them a model's weights are."""
