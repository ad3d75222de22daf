"""The engine worker: one process that owns the model, the scheduler and the KV pages of its host."""
