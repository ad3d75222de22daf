"""What runs in each step, and which KV pages belong to whom: plain integers, no tensors, no threads, no clock."""
