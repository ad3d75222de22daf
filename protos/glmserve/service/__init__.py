"""What both services need around their own job: settings, logs, gRPC server set-up, error mapping."""
