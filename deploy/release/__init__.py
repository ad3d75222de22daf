"""How wheels are built and named."""
