"""Who may call the router."""
