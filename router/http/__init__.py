"""The HTTP front: OpenAI's and Anthropic's APIs, health, metrics and a chat page, over the same core as gRPC."""
