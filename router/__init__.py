"""The stateless front: text in, text out, token ids to and from one engine worker."""
