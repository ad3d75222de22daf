"""A streaming load client: when requests arrive, how they fare, what it adds up to."""
