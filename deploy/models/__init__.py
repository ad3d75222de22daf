"""Models that glmserve can fetch by name, and their conversion to GLM-4.7's checkpoint form."""
