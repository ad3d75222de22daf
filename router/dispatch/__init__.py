"""Between the router and its worker: admission, the Serve stream, per-request token streams."""
